"""Recorder of traffic for `outrider distil`: writes token ids of answers into files, off the event loop."""

import logging
import math
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from gateway.recorded_answers import SUFFIX, RecordedAnswer
from gateway.sequence import GatewaySequence
from gateway.settings import RecordSettings
from outrider.drafters.past_answers import Scope

logger = logging.getLogger(f"ray.serve.{__name__}")

FILES = 16  # smallest number of files that share max_bytes and days: a deletion frees a 16th
LONGEST_FILE_S = 3600.0
CLEAN_EVERY_S = 60.0  # seconds between clean-ups while nothing is written
CLEAN_WITHIN_S = 1.0  # seconds between clean-ups during writes: other gateways write too
WAITING = 1024  # answers queued for writing; further answers are not recorded
END_WITHIN_S = 5.0
DIGEST_DIGITS = 12  # digits of an API key's digest in the name of its folder


class Offered(NamedTuple):
    """Answer to be recorded."""

    folder: Path
    answer: RecordedAnswer


class TrafficRecorder:
    """Samples answers at random, and writes them in a thread of its own."""

    def __init__(self, settings: RecordSettings, gateway: str) -> None:
        """gateway: part of the file names, since several gateways may share a folder."""
        self._settings = settings
        self._folder = RecordFolder(settings, gateway)
        self._random = random.Random()
        self._offered: queue.Queue[Offered | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._write_always, name="traffic recorder", daemon=True)
        self._thread.start()
        logger.info("records %g of all answers, as token ids, in %s", settings.fraction, settings.folder)

    def offer(self, sequence: GatewaySequence) -> None:
        """Queues a complete answer for writing if it is sampled. Does not block."""
        if not sequence.generated or not self._wants(sequence.scope):
            return
        answer = RecordedAnswer.model_construct(  # validated already
            prompt=sequence.prompt,
            answer=tuple(sequence.generated),
            temperature=sequence.sampling.temperature,
            task=sequence.scope.task,
        )
        try:
            self._offered.put_nowait(Offered(self._folder_of(sequence.scope), answer))
        except queue.Full:
            logger.warning("record: %d answers wait to be written, so more are not recorded", WAITING)

    def close(self) -> None:
        """Waits until the queued answers are written, or a timeout passes."""
        with suppress(queue.Full):
            self._offered.put(None, timeout=END_WITHIN_S)
            self._thread.join(END_WITHIN_S)

    def _wants(self, scope: Scope) -> bool:
        callers = self._settings.callers
        if callers and not (scope.caller or "").startswith(callers):
            return False
        return self._random.random() < self._settings.fraction

    def _folder_of(self, scope: Scope) -> Path:
        folder = Path(self._settings.folder)
        if not self._settings.by_caller:
            return folder
        return folder / (scope.caller or "anonymous").replace(" ", "-")[:DIGEST_DIGITS]

    def _write_always(self) -> None:
        while True:
            try:
                offered = self._offered.get(timeout=CLEAN_EVERY_S)
            except queue.Empty:
                self._folder.tidy()
                continue
            if offered is None:
                return
            self._folder.write(offered)


class RecordFolder:
    """Folder whose files are kept within the size and the age of the settings."""

    def __init__(
        self, settings: RecordSettings, gateway: str, clock: Callable[[], float] = time.time
    ) -> None:
        """clock: seconds since 1970."""
        self._root, self._gateway, self._clock = Path(settings.folder), gateway, clock
        self._max_bytes, self._max_age_s = settings.max_bytes, settings.days * 86400
        self._file_bytes = settings.max_bytes // FILES
        self._file_s = min(LONGEST_FILE_S, self._max_age_s / FILES)
        self._open_files: dict[Path, Path] = {}  # key: folder; value: the file that is written to
        self._room, self._cleaned_at = 0, -math.inf  # room: bytes that may be written until the next clean-up
        self._is_failing = False

    def write(self, offered: Offered) -> None:
        """Writes an answer. If that fails, the answer is lost, and the first failure is logged."""
        line = offered.answer.line().encode()
        if len(line) > self._max_bytes:
            return
        with self._failing_once():
            if len(line) > self._room or self._clock() - self._cleaned_at >= CLEAN_WITHIN_S:
                self._clean(len(line))
            offered.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self._file_in(offered.folder), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, line)
            finally:
                os.close(file)
            self._room -= len(line)

    def tidy(self) -> None:
        """Deletes old files. If that fails, the files stay, and the first failure is logged."""
        with self._failing_once():
            self._clean()

    @contextmanager
    def _failing_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._is_failing:
                logger.error("record.folder=%r cannot be written: %s", str(self._root), error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False

    def _clean(self, wanted: int = 0) -> None:
        """Deletes old files, then the oldest files until ``wanted`` bytes fit."""
        self._cleaned_at = self._clock()
        oldest = self._cleaned_at - self._max_age_s
        files = sorted((_began(file), file) for file in self._root.rglob(f"*{SUFFIX}"))
        sizes = {file: _size(file) for _, file in files}
        total = sum(sizes.values()) + wanted
        for began, file in files:
            if began >= oldest and total <= self._max_bytes:
                break
            file.unlink(missing_ok=True)
            total -= sizes[file]
        self._room = self._max_bytes - total + wanted

    def _file_in(self, folder: Path) -> Path:
        """Returns the file for the next line: the gateway's newest, or a new file if that is large or old."""
        file, now = self._open_files.get(folder), self._clock()
        if file is None or _size(file) >= self._file_bytes or now - _began(file) >= self._file_s:
            file = folder / f"{1000 * now:.0f}-{self._gateway}{SUFFIX}"
            self._open_files[folder] = file
        return file


def _began(file: Path) -> float:
    """Returns the time in the file's name, in seconds since 1970; 0 if the name has none."""
    digits = file.name.partition("-")[0]
    return int(digits) / 1000 if digits.isdecimal() else 0.0


def _size(file: Path) -> int:
    """Returns the size of a file in bytes; 0 if it was deleted."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
