# One image for head, gateway, target and draft. bash and wget, which KubeRay's probes run, come with Ray's.
FROM rayproject/ray:2.60.0-py311

# What changes seldom first. The CPU build of torch makes a much smaller image:
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir 'torch>=2.13,<2.14' --index-url "$TORCH_INDEX"

# It compiles what the engine computes with on a CPU. Ray's images without CUDA leave it out.
RUN sudo apt-get update && sudo apt-get install -y --no-install-recommends g++ && sudo rm -rf /var/lib/apt/lists/*

WORKDIR /home/ray/outrider
COPY --chown=ray:users . .
RUN pip install --no-cache-dir 'ray[serve-grpc]==2.60.0' '.[server]'
# Kernels of a GPU that a worker has compiled before, if the folder `kernels` is beside this file: k8s/README.md
RUN mkdir -p kernels && cp -r kernels /home/ray/kernels

# Away from the sources: what is imported is what was installed. The functions for a processor are compiled with
# the installation, which goes on without them if the compiler fails: then the image would be slow, unseen.
# 1000 is Ray's user, by number so that Kubernetes can tell that it is not root.
WORKDIR /home/ray
RUN [ "$(uname -m)" != x86_64 ] || ls "$(python -c 'import outrider.engine.kernels.cpu as cpu; print(*cpu.__path__)')"/avx2.*.so
USER 1000
