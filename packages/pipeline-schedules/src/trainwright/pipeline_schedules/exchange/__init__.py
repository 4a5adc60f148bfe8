"""Exchange of schedules with ``torch.distributed.pipelining``, without torch."""

from trainwright.pipeline_schedules.exchange.reading import TableError, from_csv, read_csv
from trainwright.pipeline_schedules.exchange.writing import to_csv, write_csv

__all__ = [
    "TableError",
    "from_csv",
    "read_csv",
    "to_csv",
    "write_csv",
]
