# A server on CPUs:
#
#   docker build -t shoal:cpu .
#   docker run -p 127.0.0.1:8000:8000 -v shoal-models:/models shoal:cpu
#   docker run -p 127.0.0.1:8000:8000 -v shoal-models:/models shoal:cpu serve smollm2 gemma3-270m --host 0.0.0.0
#
# For GPUs, and docker run --gpus all:
#
#   docker build -t shoal:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#
# docs/deploy.md says what of it was tried.
FROM python:3.12-slim

# The compiler builds the native kernels for x86-64, and on GPUs what launches Triton's kernels.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/shoal
COPY pyproject.toml setup.py constraints.txt MANIFEST.in README.md LICENSE ./
COPY build_backend build_backend
COPY csrc csrc
COPY src src
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt .

# Models that are fetched and converted. A new volume gets the owner of the folder.
ENV SHOAL_CACHE=/models
RUN groupadd --gid 10001 shoal && useradd --uid 10001 --gid 10001 --create-home shoal \
    && install -d -o shoal -g shoal /models
VOLUME /models
# A number, so that Kubernetes knows that it is not root.
USER 10001:10001
# Where the port is published to other hosts, set API keys: -e SHOAL_API_KEY=... (docs/operations.md).
EXPOSE 8000
# Nothing listens until the models are fetched, converted and loaded.
HEALTHCHECK --start-period=30m CMD \
    python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live', timeout=3)"
ENTRYPOINT ["shoal"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]
