"""Index the rows of a job's input, for shards of the job (job.input_index).

    python -m spmd_worker.tools.index rows.jsonl --output rows.index
    python -m spmd_worker.tools.index 'rows/*.jsonl.gz' --output rows.index

INPUT is as in job.input: a file or a pattern. Reads every byte once. A shard with the index reads only its own rows,
and checks that they are those of the index; without it each shard counts the rows before its own. Exits with 2 for an
input that cannot be read, and writes nothing then.
"""

import glob
import sys
from pathlib import Path

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import write_file
from spmd_worker.base.names import counted
from spmd_worker.base.remote_names import is_remote
from spmd_worker.frontends.batch.input.input_files import is_stream
from spmd_worker.frontends.batch.input.input_index import index_input
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.run_dir.file_names import matches
from spmd_worker.frontends.tools.program import ends_without_its_reader, local_output_name, make_parser, print_error

EXIT_DONE, EXIT_CANNOT_TELL = 0, 2


@ends_without_its_reader
def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("index", __doc__)
    parser.add_argument("input", metavar="INPUT", help="rows: a file, or a pattern such as 'rows/*.jsonl'")
    parser.add_argument("--output", type=local_output_name, metavar="FILE", required=True, help="the index to write")
    options = parser.parse_args(arguments)
    output = Path(options.output)
    try:
        index = index_input(reader_of(options.input, output))
        write_file(output, index.to_bytes())
    except (ConfigError, OSError) as error:
        # The key of a job, which shares the checks; nobody typed it here.
        print_error("index", str(error).replace("job.input=", "") if isinstance(error, ConfigError) else error)
        return EXIT_CANNOT_TELL
    print(f"{counted(index.num_rows, 'row')} in {counted(len(index.files), 'file')}", file=sys.stderr)
    return EXIT_DONE


def reader_of(name: str, output: Path) -> RowReader:
    """Reader of the rows. Raises ConfigError for a stream, and for an output that is one of its files, or would be."""
    if is_stream(name):
        raise ConfigError(f"{name} is a stream, which is read once: write the rows to a file")
    if glob.has_magic(name) and not is_remote(name) and matches(name, output):
        raise ConfigError(f"--output {output} matches {name}, and would be read as rows: give another file")
    reader = RowReader.of(name)
    for path in reader.paths or ():
        if isinstance(path, Path) and output.exists() and output.samefile(path):
            raise ConfigError(f"--output {output} is also read, and would be replaced: give another file")
    return reader
