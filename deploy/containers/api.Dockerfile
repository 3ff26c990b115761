# API, reconciler and migration: the core, the web framework and tokenizers, no torch.
#   docker build -f deploy/containers/api.Dockerfile -t ft-api:0.3.0 --build-arg SOURCE_COMMIT=$(git rev-parse HEAD) .
# Pin the base by digest for a release: --build-arg PYTHON_IMAGE=python:3.12-slim-bookworm@sha256:…
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# pip compiles what it installs: at run time nothing can be written, and every start would take seconds more.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/ft
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
ARG SOURCE_COMMIT
COPY ft_service ft_service
COPY api api
COPY workers workers
RUN /opt/ft/bin/pip install -c constraints.txt '.[api,kubernetes,s3,gs,wandb,mlflow,trackio,oidc,otel,push,mcp,openenv]'
# What is installed, as CycloneDX, by a tool that is not part of the image.
RUN python -m venv /opt/sbom && /opt/sbom/bin/pip install 'cyclonedx-bom==7.5.0' \
    && /opt/sbom/bin/cyclonedx-py environment --output-file /opt/ft/sbom.cdx.json /opt/ft/bin/python

FROM ${PYTHON_IMAGE}
ARG SOURCE_COMMIT
LABEL org.opencontainers.image.title="ft-api" \
    org.opencontainers.image.description="API and reconciler of ft-service, a self-hosted fine-tuning service" \
    org.opencontainers.image.version="0.4.0.dev0" \
    org.opencontainers.image.revision="${SOURCE_COMMIT}" \
    org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/ft ft && install -d -m 0700 -o ft -g ft /var/lib/ft
COPY --from=build /opt/ft /opt/ft
ENV PATH=/opt/ft/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 FT_HOME=/var/lib/ft
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["ft"]
CMD ["serve", "--host", "0.0.0.0"]
