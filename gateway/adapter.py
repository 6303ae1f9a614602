"""LoRA adapter of the target that a request chooses."""

from dataclasses import dataclass

from protos import rounds_pb2


@dataclass(frozen=True)
class Adapter:
    """Name and files of a LoRA adapter. A target that has not loaded it does so when a sequence is opened."""

    name: str = ""  # empty: none
    path: str = ""  # folder within target.adapter_folder; empty: the settings name the adapter
    digest: bytes = b""  # digest of its files; empty until a target has loaded them

    def to_message(self) -> rounds_pb2.Adapter:
        return rounds_pb2.Adapter(name=self.name, path=self.path, digest=self.digest)


NO_ADAPTER = Adapter()
