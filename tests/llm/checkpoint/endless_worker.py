"""Run by test_checkpointer.py until it is killed: endless_worker OUTPUT_FOLDER. Saves after every step, keeps one."""

import sys
from pathlib import Path

from mindspeed_llm.checkpoint.checkpointer import Checkpointer
from mindspeed_llm.foundation.distributed import start
from tests.llm.checkpoint.common import train, training_state

with start():
    checkpointer, state = Checkpointer(Path(sys.argv[1]), save_total_limit=1), training_state()
    while True:
        step = state.positions["place"].value
        train(state, step)
        state.positions["place"].value = step + 1
        checkpointer.save(step + 1, state)
