"""What every topology promises: one suite over all of them. What is special to one is in test_topology_graphs.py."""

from __future__ import annotations

import functools
import pickle
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from helpers.cases import case
from hypothesis import assume, given
from hypothesis import strategies as st

from thinwire import topology as tw
from thinwire.topology import __all__ as public_names

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 27, 32, 33)
LOPSIDED = ((0, 1), (0, 2), (0, 3), (1, 2), (3, 4), (4, 5))
DIRECTED = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 3), (0, 2), (4, 1))

UNDIRECTED = [
    tw.Ring(),
    tw.Torus(),
    tw.Torus(rows=3),
    tw.Complete(),
    tw.Star(),
    tw.Hypercube(),
    tw.Linear(static=True),
    tw.DavisSouthernWomen(),
    tw.WattsStrogatz(seed=3),
    tw.WattsStrogatz(degree=2, rewire=0.9),
    tw.ErdosRenyi(seed=5),
    tw.ErdosRenyi(probability=0.3),
    tw.Graph(edges=LOPSIDED),
    tw.Exponential(bidirectional=True),
    tw.Exponential(peers=2, bidirectional=True, static=True),
    tw.BipartiteExponential(),
    tw.RandomPairs(num_steps=20),
    tw.BipartiteExponential(peers=2),
    tw.BipartiteLinear(),
    tw.BipartiteLinear(static=True),
    tw.Hierarchical(tw.Ring(), workers_per_node=3),
    tw.Hierarchical(tw.Star(), workers_per_node=2),
]
REGULAR_DIRECTED = [
    tw.DirectedRing(),
    tw.Linear(),
    tw.Linear(peers=2),
    tw.OddExponential(),
    tw.OddExponential(peers=2),
    tw.Exponential(),
    tw.Exponential(peers=2),
    tw.Exponential(peers=3, static=True),
    tw.Hierarchical(tw.Exponential(), workers_per_node=4),
    tw.Phases(phases=((0, tw.Exponential(peers=2)), (3, tw.Ring()), (5, tw.Exponential())), steps_per_epoch=2),
]
FOR_PUSH_SUM = [
    tw.Star(weights="uniform"),
    tw.DavisSouthernWomen(weights="uniform"),
    tw.WattsStrogatz(weights="uniform"),
    tw.ErdosRenyi(weights="uniform"),
    tw.Graph(edges=LOPSIDED, weights="uniform"),
    tw.DirectedGraph(edges=DIRECTED),
    tw.Hierarchical(tw.DirectedGraph(edges=DIRECTED), workers_per_node=2),
    tw.Phases(phases=((0, tw.Star(weights="uniform")), (2, tw.Exponential()))),
]
EVERY = UNDIRECTED + REGULAR_DIRECTED + FOR_PUSH_SUM


def fits(topology: tw.Topology, size: int) -> bool:
    try:
        topology.validate(size)
    except ValueError:
        return False
    return True


SIZES_OF = {topology: [size for size in SIZES if fits(topology, size)] for topology in EVERY}
every_topology = pytest.mark.parametrize("topology", EVERY, ids=str)


def matrices(topology: tw.Topology, size: int, num_steps: int | None = None) -> list[np.ndarray]:
    """The matrices of the first steps; by default of all steps that differ."""
    steps = topology.steps(size) if num_steps is None else range(num_steps)
    return [topology.matrix(step, size) for step in steps]


def contraction(product: np.ndarray) -> float:
    """The factor by which repeated products shrink the workers' disagreement, per product, in the long run.

    It is measured, without eigenvalues: the norm of ``(product (I - 11'/W))^k`` to the power ``1/k``, with k = 2^20.
    """
    size = len(product)
    power, log_norm, k = product @ (np.eye(size) - 1 / size), 0.0, 1
    for _ in range(20):
        norm = np.linalg.norm(power)
        if norm == 0.0:
            return 0.0
        power, log_norm, k = (power / norm) @ (power / norm), 2 * (log_norm + np.log(norm)), 2 * k
    return float(np.exp((log_norm + np.log(max(np.linalg.norm(power), 1e-300))) / k))


@every_topology
def test_each_topology_is_tried_on_a_lone_worker_and_on_more(topology):
    assert SIZES_OF[topology][0] == 1
    assert len(SIZES_OF[topology]) >= 2


@every_topology
def test_rows_and_columns_are_those_of_the_matrix(topology):
    for size in SIZES_OF[topology]:
        for step in [*topology.steps(size), 2 * topology.period(size) + 1]:
            with case(topology, size, step):
                matrix = topology.matrix(step, size)
                for rank in range(size):
                    row, column = topology.row(rank, step, size), topology.column(rank, step, size)
                    assert {j: matrix[rank, j] for j in np.flatnonzero(matrix[rank])} == row
                    assert {j: matrix[j, rank] for j in np.flatnonzero(matrix[:, rank])} == column


@every_topology
def test_neighbours_agree_across_ranks(topology):
    for size in SIZES_OF[topology]:
        for step in topology.steps(size):
            with case(topology, size, step):
                everyone = [topology.neighbours(rank, step, size) for rank in range(size)]
                sent = {(i, j, w) for i, own in enumerate(everyone) for j, w in own.sends.items()}
                expected = {(i, j, w) for j, own in enumerate(everyone) for i, w in own.receives.items()}
                assert sent == expected
                assert all(i != j and w > 0 for i, j, w in sent)
                assert all(own.self_weight > 0 for own in everyone)


@every_topology
def test_columns_sum_to_one(topology):
    for size in SIZES_OF[topology]:
        with case(topology, size):
            for matrix in matrices(topology, size):
                np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", UNDIRECTED + REGULAR_DIRECTED, ids=str)
def test_default_weights_are_doubly_stochastic(topology):
    for size in SIZES_OF[topology]:
        with case(topology, size):
            for matrix in matrices(topology, size):
                np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=0, atol=1e-12)
            assert topology.is_doubly_stochastic(size)


@pytest.mark.parametrize("topology", UNDIRECTED, ids=str)
def test_undirected_graphs_are_symmetric(topology):
    for size in SIZES_OF[topology]:
        with case(topology, size):
            assert not topology.is_directed(size)
            assert topology.is_symmetric(size)


@every_topology
def test_facts_are_those_of_the_matrices(topology):
    for size in SIZES_OF[topology]:
        with case(topology, size):
            every = matrices(topology, size)
            assert topology.is_symmetric(size) == all(np.array_equal(m, m.T) for m in every)
            assert topology.is_directed(size) == any(not np.array_equal(m > 0, m.T > 0) for m in every)
            assert topology.is_doubly_stochastic(size) == all(
                np.allclose(m.sum(axis=1), 1.0, atol=1e-12) for m in every
            )


@pytest.mark.parametrize("topology", FOR_PUSH_SUM, ids=str)
def test_uniform_weights_on_irregular_graphs_are_not_doubly_stochastic(topology):
    assert not topology.is_doubly_stochastic(SIZES_OF[topology][-1])


@every_topology
def test_period_is_the_shortest(topology):
    for size in SIZES_OF[topology]:
        with case(topology, size):
            period, start = topology.period(size), topology.steps(size)[-1] + 1
            cycle = matrices(topology, size, start + 2 * period)[start:]
            repeats = [p for p in range(1, period + 1) if all(map(np.array_equal, cycle, cycle[p : p + period]))]
            assert repeats[0] == period


@every_topology
def test_workers_agree_at_the_rate_of_the_spectral_gap(topology):
    """One worker's value reaches all others within some periods, and disagreement shrinks as the gap says."""
    for size in SIZES_OF[topology][1:]:
        with case(topology, size):
            period = topology.period(size)
            cycle = matrices(topology, size)[-period:]
            product = functools.reduce(lambda total, matrix: matrix @ total, cycle)
            rate = contraction(product)
            assert rate < 1
            assert (1 - topology.spectral_gap(size)) ** period == pytest.approx(rate, rel=1e-3, abs=1e-7)
            arcs = nx.from_numpy_array(sum(cycle), create_using=nx.DiGraph)
            assert nx.is_strongly_connected(arcs)


@every_topology
def test_repr_rebuilds(topology):
    rebuilt = eval(repr(topology), {name: getattr(tw, name) for name in public_names})
    assert rebuilt == topology
    assert hash(rebuilt) == hash(topology)
    assert pickle.loads(pickle.dumps(topology)) == topology


@every_topology
def test_a_lone_worker_mixes_with_itself(topology):
    assert topology.neighbours(0, 0, 1) == ({}, {}, 1.0)
    assert topology.period(1) == 1
    assert topology.spectral_gap(1) == 1.0


@every_topology
def test_an_impossible_rank_or_step_is_an_error(topology):
    size = SIZES_OF[topology][-1]
    with pytest.raises(ValueError, match=f"rank {size} is out of range"):
        topology.neighbours(size, 0, size)
    with pytest.raises(ValueError, match="rank -1 is out of range"):
        topology.row(-1, 0, size)
    with pytest.raises(ValueError, match="at least 1 worker"):
        topology.period(0)
    with pytest.raises(ValueError, match="counted from 0"):
        topology.column(0, -1, size)


CIRCULANT = st.one_of(
    st.just(tw.Ring()),
    st.just(tw.DirectedRing()),
    st.builds(tw.Linear, peers=st.integers(1, 4), static=st.booleans()),
    st.builds(tw.OddExponential, peers=st.integers(1, 2), static=st.booleans()),
    st.builds(tw.Exponential, peers=st.integers(1, 4), static=st.booleans(), bidirectional=st.booleans()),
    st.builds(tw.BipartiteExponential, peers=st.integers(1, 3), static=st.booleans()),
    st.builds(tw.BipartiteLinear, peers=st.integers(1, 3), static=st.booleans()),
    st.builds(tw.Torus, rows=st.none() | st.integers(2, 9)),
    st.just(tw.Hypercube()),
)


@given(topology=CIRCULANT, size=st.integers(2, 3000), step=st.integers(0, 10**9), data=st.data())
def test_large_regular_graphs(topology, size, step, data):
    """One rank's view at any size: peers are distinct others, they look back, and weights sum to one exactly."""
    assume(fits(topology, size))
    rank = data.draw(st.integers(0, size - 1))
    own = topology.neighbours(rank, step, size)
    assert rank not in own.sends
    assert len(own.sends) == len(own.receives)
    share = Fraction(1, len(own.sends) + 1)
    assert set(own.sends.values()) | set(own.receives.values()) | {own.self_weight} == {float(share)}
    peer = data.draw(st.sampled_from(sorted(own.sends)))
    assert topology.neighbours(peer, step, size).receives[rank] == own.sends[peer]


@given(data=st.data(), size=st.integers(2, 12))
def test_any_connected_graph_gets_doubly_stochastic_weights(data, size):
    tree = [(data.draw(st.integers(0, rank - 1)), rank) for rank in range(1, size)]
    more = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=10))
    graph = tw.Graph(edges=(*tree, *(edge for edge in more if edge[0] != edge[1])))
    matrix = graph.matrix(0, size)
    np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=0, atol=1e-12)
    assert np.array_equal(matrix, matrix.T)
    assert eval(repr(graph), {"Graph": tw.Graph}) == graph


def test_a_hierarchy_looks_alike_from_nodes_and_not_from_workers():
    """Among two nodes of two, all weights are 1/4, but only leaders send messages to the other node."""
    nodes = tw.Hierarchical(tw.Ring(), workers_per_node=2)
    for topology in (nodes, tw.Phases(((0, tw.Ring()), (3, nodes)))):
        assert not topology.is_circulant(4) and topology.is_circulant(4, shift=2)
