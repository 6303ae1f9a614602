"""Place of an engine's process: its node's hardware, its resources from Ray, and settings from both."""

import fcntl
import logging
import os
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

from actors.messages import ProcessPlace
from outrider.engine.errors import NoDeviceError
from outrider.engine.settings import EngineSettings

logger = logging.getLogger(f"ray.serve.{__name__}")

GPUS = "CUDA_VISIBLE_DEVICES"
# Variables by which launchers such as torchrun name a process's device and group. Each rank here has one
# device and a group of its own, so variables of another launcher would mislead the libraries that read them.
LAUNCHERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
EXACTLY = {"NCCL_SOCKET_IFNAME": "="}  # prefix of an exact name: NCCL takes a bare name as a prefix
SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface
IFNAMSIZ = 16  # bytes of an interface's name, linux/if.h
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # microseconds of CPU time and of its period; "max": no limit


def gpus_given() -> tuple[str, ...] | None:
    """Returns the ids of the GPUs that Ray has reserved for this process; None outside of Ray.

    The ids are indices or UUIDs, as in the node's own CUDA_VISIBLE_DEVICES.
    """
    import ray  # the engine's process does not need it

    if not ray.is_initialized():
        return None
    return tuple(sorted(ray.get_runtime_context().get_accelerator_ids()["GPU"]))


def confine(environment: MutableMapping[str, str], gpus: tuple[str, ...] | None) -> None:
    """Changes an environment so that its process sees only the given GPUs, and no other launcher's variables.

    Ray does not hide GPUs from a process without GPUs, or if RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is
    set.

    gpus: ids of GPUs; None: all GPUs of the node.
    """
    if gpus is not None:
        environment[GPUS] = ",".join(gpus)
    for name in LAUNCHERS:
        environment.pop(name, None)


def meet_at(environment: MutableMapping[str, str], address: str) -> None:
    """Changes an environment so that its rank uses the network interface with its node's address.

    By default gloo uses the address of the host's name, which other nodes often cannot reach. NCCL uses the
    first interface. Values that are already set are kept.

    address: address by which Ray knows this node.
    """
    missing = [name for name in INTERFACES if not environment.get(name)]
    if not missing:
        return
    interface = interface_of(address)
    if interface is None:
        logger.warning(
            "no network interface of this node has its address %s: set %s if ranks do not meet",
            address,
            " and ".join(missing),
        )
        return
    for name in missing:
        environment[name] = EXACTLY.get(name, "") + interface


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this IP address; None: no interface has this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        packed = socket.inet_pton(family, address)
    except OSError:
        return None
    if family == socket.AF_INET6:
        return _interface_of_ipv6(packed)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{IFNAMSIZ}s{IFNAMSIZ}x", name.encode())
            try:
                answer = fcntl.ioctl(asked, SIOCGIFADDR, request)
            except OSError:  # the interface has no IPv4 address
                continue
            if answer[IFNAMSIZ + 4 : IFNAMSIZ + 8] == packed:
                return name
    return None


def _interface_of_ipv6(packed: bytes) -> str | None:
    file = Path("/proc/net/if_inet6")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.split()[-1] for line in lines if line.split()[0] == packed.hex()), None)


def cores_here() -> int:
    """Returns how many cores this process may use: all cores of its node, or fewer in a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = CPU_LIMIT.read_text().partition(" ") if CPU_LIMIT.exists() else ("max", "", "")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def with_threads(settings: EngineSettings, sharing: int) -> EngineSettings:
    """Returns settings with the threads of a target's process on this node, unless they are given.

    sharing: processes of the target on this node. One core is left to gateway and frontend: a thread that
        waits for a core at the end of an operation stalls all other threads.
    """
    if settings.threads is not None:
        return settings
    return settings.model_copy(update={"threads": max(1, (cores_here() - 1) // sharing)})


def told(place: ProcessPlace) -> str:
    """Returns one line for the log."""
    gb = 10**9
    sees = ", ".join(place.sees) or "no GPU"
    on = f" on node {place.node}" if place.node else ""
    meets = f", meets over {place.interface}" if place.interface else ""
    return (
        f"rank {place.rank} takes {place.device} with {place.memory / gb:.1f} GB, at most"
        f" {place.may_take / gb:.1f} of them, and {place.threads} threads; process {place.pid}{on} sees"
        f" {sees} ({GPUS}={place.gpus!r}){meets}"
    )


def address(host: str, place: ProcessPlace) -> str:
    """Returns the node and the interface of a rank, for messages to other ranks."""
    return f"{host} over {place.interface}" if place.interface else host


def place_of(settings: EngineSettings, rank: int) -> ProcessPlace:
    """Returns the place of this process: its device, memory and threads. Loads nothing onto the device.

    Raises:
        NoDeviceError: the process was given a GPU, and torch sees no GPU.
    """
    import torch

    from outrider.engine.loading.weights import resolve_device
    from outrider.engine.planning.memory import device_memory

    count = torch.cuda.device_count()
    if settings.device.startswith("cuda") and not count:
        raise NoDeviceError(
            f"device={settings.device!r} with {GPUS}={os.environ.get(GPUS)!r}: torch {torch.__version__} sees"
            " no GPU here; install its build for CUDA and the node's driver, or give the worker gpus=0"
        )
    device = resolve_device(settings.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)  # the first of the devices that this process sees
    memory = device_memory(device)
    return ProcessPlace(
        rank=rank,
        pid=os.getpid(),
        gpus=os.environ.get(GPUS),
        sees=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        device=str(device),
        memory=memory,
        may_take=int(settings.device_share * memory),
        threads=settings.threads or torch.get_num_threads(),
        interface=os.environ.get(INTERFACES[0]) if settings.tensor_parallel > 1 else None,
    )
