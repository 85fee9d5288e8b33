"""Log lines go on whatever becomes of other processes."""

import subprocess
import sys

KILLED_WHILE_IT_WRITES = """
import logging, os, signal, time
from tqdm import tqdm
from shared import log

log.configure()
logging.getLogger("shared.log").info("begun")
read, write = os.pipe()
child = os.fork()
if child == 0:
    tqdm.get_lock().acquire()
    os.write(write, b"x")
    time.sleep(60)
os.read(read, 1)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
logging.getLogger("shared.log").info("still here")
"""


def test_a_fork_killed_while_it_writes_a_line_does_not_silence_its_parent() -> None:
    """tqdm's own lock is one of all processes, and a killed one never lets go of it."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_IT_WRITES], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "still here" in done.stderr
