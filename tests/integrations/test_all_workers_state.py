"""The states of all workers, as trainers save them."""

from __future__ import annotations

from torch import nn

import thinwire as tw
from thinwire.comm import laid_out
from thinwire.comm.layout import Layout
from thinwire.integrations.state import AllWorkersState


def test_the_main_process_has_all_states_where_a_layout_gives_it_another_rank():
    def worker(comm):
        given, model = comm.rank, nn.Linear(2, 2)
        with tw.compress_gradients(model, tw.Mean(), comm=laid_out(comm, Layout((2, 0, 1)))) as strategy:
            assert strategy.comm.rank == (1, 2, 0)[given]
            return sorted(AllWorkersState(strategy, model, []).state_dict())

    assert tw.LocalWorld(3).run(worker) == [["rank0", "rank1", "rank2"], ["rank2"], ["rank0"]]
