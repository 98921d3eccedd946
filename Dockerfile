# Two images from one file: `--target api` (light, no torch) and `--target worker` (the model).
# EXTRA=worker takes torch built for CPUs, EXTRA=gpu the one for CUDA. constraints.txt and constraints-gpu.txt hold the
# versions that were tested. To pin the base by digest: --build-arg PYTHON_IMAGE=python:3.12.12-slim-trixie@sha256:...
ARG PYTHON_IMAGE=python:3.12.12-slim-trixie
FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A numeric user, as runAsNonRoot asks; the folders are its own, and so are volumes that begin as copies of them.
RUN useradd --uid 10001 --user-group --create-home d3serve \
 && install -d -o d3serve -g d3serve /models /states
WORKDIR /src
COPY pyproject.toml setup.py constraints.txt constraints-gpu.txt README.md LICENSE ./
COPY d3serve d3serve
COPY api api
COPY worker worker
COPY model model
COPY kernels kernels
COPY checkpoints checkpoints

FROM base AS api
RUN pip install -c constraints.txt ".[otel]"
WORKDIR /
USER 10001:10001
EXPOSE 8000
CMD ["d3serve", "api", "--host", "0.0.0.0"]

FROM base AS worker
ARG EXTRA=worker
# Triton compiles small C programs when it meets a GPU.
RUN if [ "$EXTRA" = gpu ]; then \
      apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
      && pip install -c constraints-gpu.txt ".[gpu,media,otel]"; \
    else \
      pip install -c constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu ".[$EXTRA,media,otel]"; \
    fi
ENV HF_HOME=/models TRITON_CACHE_DIR=/tmp/triton
WORKDIR /
USER 10001:10001
CMD ["d3serve", "worker"]
