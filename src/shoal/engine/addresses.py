"""Addresses of an engine's sockets; that of a TCP socket has the key without which it answers nobody.

A TCP socket is a CurveZMQ server with a key pair of its own (ZeroMQ RFC 26). Its public key is
never sent in the clear, and is known only to those whom the engine's owner tells the address: so the key is
what lets a peer in, and what is sent is encrypted. Sockets in a folder are protected by the folder.
"""

import zmq

_KEY_MARK = "#"


def listen(socket: "zmq.Socket[bytes]", bind: str) -> str:
    """Bind a socket, at a port "*" or a given one; returns the address for ``connect``.

    Raises zmq.ZMQError where that fails.
    """
    key = ""
    if bind.startswith("tcp:"):
        public, secret = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_server = True
        key = _KEY_MARK + public.decode()
    socket.bind(bind)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") + key


def connect(socket: "zmq.Socket[bytes]", address: str) -> None:
    """Connect a socket to an address of ``listen``; raises zmq.ZMQError for an invalid one."""
    endpoint, _, key = address.partition(_KEY_MARK)
    if key:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = key.encode()
    socket.connect(endpoint)
