# The CPU environment and the demo: no GPU, no Transformer Engine. About 8 GB.
#
#     docker build -t qwen3vl-bridge .
#     docker run --rm -v "$PWD/out:/opt/qwen3vl_bridge/out" qwen3vl-bridge              # the demo
#     docker run --rm -it qwen3vl-bridge .venv/bin/qwen3vl --help
#
# docker has not built it yet; its commands were run one after the other in an empty folder (requirements/README.md).
FROM python:3.12-slim-bookworm

RUN apt-get update \
    && apt-get install --no-install-recommends --yes make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/qwen3vl_bridge

# Files that determine the environment are copied first, so that code changes do not rebuild it.
COPY Makefile pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY scripts/setup_env.sh scripts/find_python.sh scripts/
RUN make env && rm -rf ~/.cache

COPY . .
CMD ["make", "demo"]
