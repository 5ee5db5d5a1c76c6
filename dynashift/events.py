"""Numbers for TensorBoard.

Its own writer runs in a thread, in which a full disk ends in a traceback and lost events.
"""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from dynashift.files import CannotWrite


class Events:
    """A file of events in TensorBoard's format. Each is written at once, or raises CannotWrite."""

    def __init__(self, folder: Path, first_step: int):
        """first_step: the step from which TensorBoard ignores the events of earlier files.

        See `purge_step` in TensorBoard.
        """
        # Imported here because it takes a while.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.name = str(folder / name)
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
        """Called by the RecordWriter."""
        try:
            left = memoryview(record)
            while left:
                left = left[self.file.write(left) :]  # on a nearly full disk only a part is written
            self.size += len(record)
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(self.size)
            raise CannotWrite(error.errno, error.strerror, self.name) from error

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()
