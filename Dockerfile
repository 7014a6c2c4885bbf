# Trains in a container. EXTRA is tpu, cuda, or empty for a CPU:
#
#   docker build --build-arg EXTRA=cuda --tag jaxrl_llm .
#   docker run --rm --gpus all --volume "$PWD/runs:/app/runs" jaxrl_llm --config configs/grpo.py --workdir runs/mine
#
# Rewards that run programs need namespaces: add --security-opt seccomp=unconfined --security-opt apparmor=unconfined.
# The folder runs must be writable for user 1000. launch/gke_jobset.sh runs the image with EXTRA=tpu on GKE.
FROM python:3.12.12-slim-bookworm
ARG EXTRA=tpu
RUN useradd --create-home --uid 1000 trainer && mkdir -p /app/runs && chown trainer /app/runs
WORKDIR /app
# It confines the programs of the policy.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*

# The packages are a layer of their own: a change of the code does not install them again. The installation refers to
# the folder, so the code can follow.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY jaxrl_llm/__init__.py jaxrl_llm/
RUN pip install --no-cache-dir --constraint constraints.txt --editable ".${EXTRA:+[$EXTRA]}"
COPY jaxrl_llm jaxrl_llm
COPY configs configs
# What is yours, if there is a folder mine: config, rewards, data and requirements.txt. A COPY must find one file.
COPY LICENSE min[e] mine/
RUN [ ! -e mine/requirements.txt ] || pip install --no-cache-dir -c constraints.txt -r mine/requirements.txt

USER 1000
ENTRYPOINT ["python", "-m", "jaxrl_llm.train"]
