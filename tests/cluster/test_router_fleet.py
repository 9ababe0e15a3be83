"""A router whose fleet follows the load: standby, activation, goals, and placing on single engines."""

import asyncio

import pytest
from fake_cluster import FakeBackend
