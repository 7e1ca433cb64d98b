# Learners and servers on NVIDIA GPUs. CUDA comes with the packages; the host needs driver 580 and the container toolkit.
# docker build --file docker/cuda.Dockerfile --tag rlsvc/cuda:0.1.0 .
FROM python:3.12.12-slim-bookworm AS build
ARG EXTRAS="learn cluster sim vla zarr lerobot cuda"
# Exact versions of Debian's packages vanish from its mirrors with every update; the release is fixed by the base.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libc6-dev linux-libc-dev make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/rlsvc
# The last stage has the same interpreter in the same place, and no other.
ENV UV_PYTHON_DOWNLOADS=never
COPY Makefile pyproject.toml uv.lock README.md LICENSE ./
RUN make install-packages EXTRAS="$EXTRAS"
COPY rlsvc rlsvc
RUN make install haproxy EXTRAS="$EXTRAS"

FROM python:3.12.12-slim-bookworm
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends libegl1 libgl1 libgl1-mesa-dri libglib2.0-0 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 rlsvc \
    && useradd --uid 10001 --gid 10001 --create-home rlsvc \
    && install --directory --owner rlsvc --group rlsvc /shared /mlflow
COPY --from=build /opt/rlsvc/.venv /opt/rlsvc/.venv
# RAY_AUTH_MODE: whoever reaches a Ray without tokens runs code on it.
ENV PATH="/opt/rlsvc/.venv/bin:$PATH" \
    PYTHONUNBUFFERED=1 \
    RAY_AUTH_MODE=token \
    RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 \
    RAY_TRAIN_V2_ENABLED=1 \
    RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/rlsvc/.venv/bin/rlsvc-haproxy \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
USER 10001:10001
WORKDIR /home/rlsvc
CMD ["rlsvc", "doctor"]
