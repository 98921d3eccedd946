# Two images from one file: `--target api` (light, no torch) and `--target worker` (the model).
# The worker takes the CPU or the CUDA build of torch by EXTRA: worker | gpu.
FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /app
RUN useradd --create-home --uid 10001 d3serve
COPY pyproject.toml README.md ./
COPY d3serve d3serve
COPY api api
COPY worker worker
COPY model model
COPY kernels kernels

FROM base AS api
RUN pip install .
USER d3serve
EXPOSE 8000
CMD ["d3serve", "api", "--host", "0.0.0.0"]

FROM base AS worker
ARG EXTRA=worker
RUN pip install ".[${EXTRA}]"
COPY checkpoints checkpoints
USER d3serve
CMD ["d3serve", "worker"]
