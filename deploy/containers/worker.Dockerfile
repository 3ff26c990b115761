# Workers: torch with its CUDA libraries, which need only the driver that the container runtime brings. It holds the API too, for one
# GPU host without a cluster (compose.yaml).
#   docker build -f deploy/containers/worker.Dockerfile -t ft-worker:0.3.0 --build-arg SOURCE_COMMIT=$(git rev-parse HEAD) .
# Another CUDA version, or none: --build-arg TORCH_INDEX=<URL that the selector on pytorch.org shows>
# Pin the base by digest for a release: --build-arg PYTHON_IMAGE=python:3.12-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=
# pip compiles what it installs: without that each start of a rank would, for seven seconds, and could not keep it.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/ft
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
# Alone and first: the largest layer changes least.
RUN /opt/ft/bin/pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
# After the packages above, which are the same for every commit.
ARG SOURCE_COMMIT
COPY ft_service ft_service
COPY api api
COPY workers workers
RUN /opt/ft/bin/pip install -c constraints.txt '.[workers,api,s3,gs,wandb,mlflow,trackio,oidc,otel,push,torchao,mcp,openenv]'
# What is installed, as CycloneDX, by a tool that is not part of the image.
RUN python -m venv /opt/sbom && /opt/sbom/bin/pip install 'cyclonedx-bom==7.5.0' \
    && /opt/sbom/bin/cyclonedx-py environment --output-file /opt/ft/sbom.cdx.json /opt/ft/bin/python

FROM ${PYTHON_IMAGE}
ARG SOURCE_COMMIT
LABEL org.opencontainers.image.title="ft-worker" \
    org.opencontainers.image.description="Workers of ft-service, a self-hosted fine-tuning service" \
    org.opencontainers.image.version="0.4.0.dev0" \
    org.opencontainers.image.revision="${SOURCE_COMMIT}" \
    org.opencontainers.image.licenses="Apache-2.0"
# distributed.compile builds its launchers with a C compiler. NCCL loads the RDMA libraries if they are there; without them it would
# use sockets and not say so.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /var/lib/ft ft && install -d -m 0700 -o ft -g ft /var/lib/ft /var/cache/ft
COPY --from=build /opt/ft /opt/ft
ENV PATH=/opt/ft/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 FT_HOME=/var/lib/ft \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
ENTRYPOINT ["python", "-P", "-m", "ft_service.supervisor"]
