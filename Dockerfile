# One image for head, gateway, target and draft. bash and wget, which KubeRay's probes run, come with Ray's.
# Its tag is the version of Ray in k8s/base/rayservice.yaml and of the clients that talk to the cluster.
FROM rayproject/ray:2.60.0-py311

# The CPU build of torch makes a much smaller image: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://pypi.org/simple

WORKDIR /home/ray/outrider
COPY --chown=ray:users pyproject.toml README.md ./
COPY --chown=ray:users decoding decoding
COPY --chown=ray:users protos protos
COPY --chown=ray:users engine engine
COPY --chown=ray:users actors actors
COPY --chown=ray:users gateway gateway
COPY --chown=ray:users cluster cluster
COPY --chown=ray:users client client
COPY --chown=ray:users models models
COPY --chown=ray:users bench bench

RUN pip install --no-cache-dir 'torch>=2.13,<2.14' --index-url "$TORCH_INDEX" \
    && pip install --no-cache-dir 'ray[serve-grpc]==2.60.0' .

# Away from the sources: what is imported is what was installed. 1000 is Ray's user, by number so that
# Kubernetes can tell that it is not root.
WORKDIR /home/ray
USER 1000
