# meshwright with everything that `train` needs. How it is used: docs/guides/install.md.
FROM python:3.12-slim

WORKDIR /opt/meshwright
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY recipes recipes
# torch's default build for Linux has CUDA; other builds: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir --constraint constraints.txt ".[train]"

# Containers often run with the user id of the host, which has no home here.
ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["meshwright"]
CMD ["--help"]
