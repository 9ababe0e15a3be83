# A server on CPUs:
#
#   docker build -t shoal .
#   docker run -p 127.0.0.1:8000:8000 -v shoal-models:/models shoal
#   docker run -p 127.0.0.1:8000:8000 -v shoal-models:/models shoal serve smollm2 gemma3-270m --host 0.0.0.0
#
# For GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130, and docker run --gpus all.
FROM python:3.12-slim

# The compiler builds the native kernels for x86-64.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/shoal
COPY pyproject.toml setup.py constraints.txt MANIFEST.in README.md LICENSE ./
COPY build_backend build_backend
COPY csrc csrc
COPY src src
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt .

# Models that are fetched and converted.
ENV SHOAL_CACHE=/models
VOLUME /models
# Where the port is published to other hosts, set API keys: -e SHOAL_API_KEY=... (docs/operations.md).
EXPOSE 8000
HEALTHCHECK --start-period=120s CMD \
    python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/live', timeout=3)"
ENTRYPOINT ["shoal"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]
