# One image for every service: `docker run IMAGE decode --config ...`. CPU build of torch.
FROM python:3.11-slim

ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /src
# torch first and alone, as in the Makefile: it changes rarely, and nothing else may pick its build.
COPY constraints.txt ./
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX_URL" pip install -c constraints.txt torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY flashmesh flashmesh
COPY kernels kernels
COPY services services
RUN pip install -c constraints.txt '.[grammar-cpu]' \
    && pip install -c constraints.txt --no-deps xgrammar

# Volumes take their owner from here, so that secrets and blocks stay readable for their owner alone.
RUN useradd --uid 10001 --create-home flashmesh \
    && install -d -o flashmesh -m 0700 /run/flashmesh /var/lib/flashmesh
WORKDIR /app
COPY config config
USER flashmesh
ENTRYPOINT ["flashmesh"]
