"""Numbers for TensorBoard. Its own writer works in a thread, where a full disk ends in a traceback and lost events."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from dynashift.files import CannotWrite


class Events:
    """A file of events in TensorBoard's format. Each is written at once and whole, or a CannotWrite says why not."""

    def __init__(self, folder: Path, first_step: int):
        """first_step: events of earlier files from this step on are void, see `purge_step` of TensorBoard."""
        from tensorboard.compat.proto.event_pb2 import (
            Event,
            SessionLog,
        )  # here, because it takes a while
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.name = str(
            folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        )
        self.event = Event
        self.records = RecordWriter(self)
        self.size = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(self.name, "ab", buffering=0)  # noqa: SIM115  closed by `close`
            self.size = self.file.tell()
        except OSError as error:
            raise CannotWrite(error.errno, error.strerror, self.name) from error
        self.add(file_version="brain.Event:2")
        self.add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, **content) -> None:
        self.records.write(self.event(wall_time=time.time(), **content).SerializeToString())

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.add(step=step, summary={"value": [{"tag": tag, "simple_value": float(value)}]})

    def write(self, record: bytes) -> None:
        """What the RecordWriter calls."""
        try:
            left = memoryview(record)
            while left:
                left = left[self.file.write(left) :]  # may write a part, if the disk is nearly full
            self.size += len(record)
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(self.size)
            raise CannotWrite(error.errno, error.strerror, self.name) from error

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()
