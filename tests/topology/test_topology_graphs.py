"""Single topologies against closed forms, networkx, and their definitions; and the errors for impossible requests."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from math import cos, log2, pi
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from thinwire import topology as tw
from thinwire.topology.random_graphs import UniformStream
from thinwire.topology.speed import rounds_to_reach_all

DOCUMENT = Path(__file__).parents[2] / "docs" / "topologies.md"


def as_networkx(topology: tw.Topology, size: int, step: int = 0) -> nx.DiGraph:
    graph = nx.empty_graph(size, create_using=nx.DiGraph)
    graph.add_edges_from((i, j) for i in range(size) for j in topology.neighbours(i, step, size).sends)
    return graph


def edges(graph: nx.Graph) -> set[tuple[int, int]]:
    return set(graph.to_directed().edges)


def distances(topology: tw.Topology, size: int, rank: int = 0) -> list[list[int]]:
    """The distances to whom a rank sends, step by step over one period."""
    steps = range(topology.period(size))
    return [[(peer - rank) % size for peer in topology.neighbours(rank, step, size).sends] for step in steps]


def product(topology: tw.Topology, size: int) -> np.ndarray:
    total = np.eye(size)
    for step in range(topology.period(size)):
        total = topology.matrix(step, size) @ total
    return total


# Exact averaging


@pytest.mark.parametrize("k", range(1, 8))
def test_one_peer_exponential_reaches_the_mean_exactly_in_log2_steps(k):
    size = 2**k
    assert tw.Exponential().period(size) == k
    assert np.array_equal(product(tw.Exponential(), size), np.full((size, size), 1 / size))
    assert tw.Exponential().spectral_gap(size) == 1.0


@pytest.mark.parametrize(("peers", "size"), [(2, 3), (2, 9), (2, 27), (3, 16), (3, 64), (4, 25)])
def test_exponential_reaches_the_mean_exactly_on_powers_of_peers_plus_one(peers, size):
    topology = tw.Exponential(peers=peers)
    np.testing.assert_allclose(product(topology, size), 1 / size, rtol=1e-14)
    assert topology.spectral_gap(size) == 1.0


@pytest.mark.parametrize("topology", [tw.Linear(), tw.BipartiteLinear()], ids=str)
@pytest.mark.parametrize("size", [12, 16, 20, 32, 60])
def test_only_what_whole_numbers_call_exact_has_a_gap_of_one(topology, size):
    """Weights are 1/2, so twice the matrices are whole. Over 30 steps what is left may be less than a float64 resolves."""
    product = np.eye(size, dtype=int).astype(object)
    for step in range(topology.period(size)):
        product = (2 * topology.matrix(step, size)).astype(int).astype(object).dot(product)
    is_exact = len(set(product.ravel())) == 1
    assert (topology.spectral_gap(size) == 1.0) == is_exact == (topology == tw.BipartiteLinear() and size in (16, 32))


@pytest.mark.parametrize(
    ("topology", "size"),
    [(tw.Linear(), 60), (tw.BipartiteLinear(), 60), (tw.RandomPairs(), 6), (tw.Hierarchical(tw.Linear(), 2), 80)],
    ids=str,
)
def test_the_gap_is_right_where_a_period_leaves_less_than_a_float_resolves(topology, size):
    """Against the disagreement of random vectors, which is scaled up after each step."""
    x, logs = np.random.default_rng(0).standard_normal((size, 20)), []
    for _ in range(40):
        for step in range(topology.period(size)):
            x = topology.matrix(step, size) @ x
            x -= x.mean(0)
            norm = np.linalg.norm(x)
            x, logs = x / norm, [*logs, np.log(norm)]
    half = logs[len(logs) // 2 :]
    assert topology.spectral_gap(size) == pytest.approx(1 - np.exp(np.mean(half)), abs=1e-3)


# Closed forms of the spectral gap


@pytest.mark.parametrize("n", [3, 4, 5, 8, 16, 33, 64])
def test_spectral_gaps_of_rings(n):
    eigenvalues = [(1 + 2 * cos(2 * pi * k / n)) / 3 for k in range(1, n)]
    assert tw.Ring().spectral_gap(n) == pytest.approx(1 - max(map(abs, eigenvalues)), abs=1e-12)
    assert tw.Ring().spectral_gap(n) == pytest.approx(1 - (1 + 2 * cos(2 * pi / n)) / 3) or n < 4
    assert tw.DirectedRing().spectral_gap(n) == pytest.approx(1 - cos(pi / n), abs=1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (3, 4), (4, 4), (4, 5), (5, 7), (8, 8)])
def test_spectral_gap_of_the_torus(rows, columns):
    def eigenvalue(i, j):
        return (1 + 2 * cos(2 * pi * i / rows) + 2 * cos(2 * pi * j / columns)) / 5

    others = [abs(eigenvalue(i, j)) for i in range(rows) for j in range(columns) if i or j]
    assert tw.Torus(rows=rows).spectral_gap(rows * columns) == pytest.approx(1 - max(others), abs=1e-12)


@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_spectral_gaps_of_complete_and_star(n):
    assert tw.Complete().spectral_gap(n) == 1.0
    if n > 2:  # the leaves' differences keep 1 - 1/W
        assert tw.Star().spectral_gap(n) == pytest.approx(1 / n)


@pytest.mark.parametrize("k", range(1, 7))
def test_spectral_gap_of_the_hypercube(k):
    assert tw.Hypercube().spectral_gap(2**k) == pytest.approx(1.0 if k == 1 else 2 / (k + 1))


@pytest.mark.parametrize("n", [8, 16, 32, 64])
def test_spectral_gap_of_the_static_exponential_graph(n):
    """The eigenvalue of the alternating vector loses only the odd distance (Ying et al. 2021, Proposition 1)."""
    assert tw.Exponential(static=True).spectral_gap(n) == pytest.approx(2 / (1 + log2(n)))


def test_second_largest_modulus_counts_not_the_second_largest_eigenvalue():
    """Complete bipartite K(3,3) with uniform weights: eigenvalues 1, 1/4 (four times), -1/2."""
    graph = tw.from_networkx(nx.complete_bipartite_graph(3, 3))
    assert graph.spectral_gap(6) == pytest.approx(0.5)


# Against networkx


@pytest.mark.parametrize(
    ("topology", "graph"),
    [
        (tw.Ring(), nx.cycle_graph(9)),
        (tw.Ring(), nx.path_graph(2)),
        (tw.DirectedRing(), nx.cycle_graph(9, create_using=nx.DiGraph)),
        (tw.Complete(), nx.complete_graph(7)),
        (tw.Star(), nx.star_graph(8)),
        (tw.Torus(), nx.convert_node_labels_to_integers(nx.grid_2d_graph(4, 5, periodic=True))),
        (tw.Torus(), nx.convert_node_labels_to_integers(nx.grid_2d_graph(2, 3, periodic=True))),
        (tw.Torus(rows=6), nx.convert_node_labels_to_integers(nx.grid_2d_graph(6, 4, periodic=True))),
        (tw.DavisSouthernWomen(), nx.convert_node_labels_to_integers(nx.davis_southern_women_graph())),
        (tw.Exponential(static=True, bidirectional=True), nx.circulant_graph(16, [1, 2, 4, 8])),
        (tw.BipartiteLinear(static=True), nx.circulant_graph(10, [1, 3, 5])),
        (tw.WattsStrogatz(rewire=0.0), nx.circulant_graph(12, [1, 2])),
        (tw.ErdosRenyi(probability=1.0), nx.complete_graph(6)),
    ],
    ids=str,
)
def test_named_graphs_are_those_of_networkx(topology, graph):
    assert edges(as_networkx(topology, len(graph))) == edges(graph)


def test_hypercube_is_that_of_networkx():
    graph = nx.relabel_nodes(nx.hypercube_graph(4), lambda bits: int("".join(map(str, bits)), 2))
    assert edges(as_networkx(tw.Hypercube(), 16)) == edges(graph)


@pytest.mark.parametrize(
    "graph", [nx.karate_club_graph(), nx.petersen_graph(), nx.gn_graph(9, seed=1).to_undirected(), nx.path_graph("abc")]
)
def test_any_networkx_graph(graph):
    topology, size = tw.from_networkx(graph), len(graph)
    assert isinstance(topology, tw.Graph)
    assert edges(as_networkx(topology, size)) == edges(nx.convert_node_labels_to_integers(graph))
    assert topology.is_doubly_stochastic(size)


def test_any_directed_networkx_graph():
    graph = nx.compose(nx.cycle_graph(7, create_using=nx.DiGraph), nx.gn_graph(7, seed=2))
    graph.add_edge(3, 3)
    topology = tw.from_networkx(graph)
    graph.remove_edge(3, 3)
    assert isinstance(topology, tw.DirectedGraph)
    assert edges(as_networkx(topology, 7)) == set(graph.edges)
    np.testing.assert_allclose(topology.matrix(0, 7).sum(axis=0), 1.0)


def test_parallel_edges_count_once():
    assert tw.from_networkx(nx.MultiGraph([(0, 1), (0, 1), (1, 2)])) == tw.Graph(edges=((0, 1), (1, 2)))


def test_metropolis_weights():
    """1 / (1 + the larger degree) on edges; the rest stays at home."""
    graph = tw.Graph(edges=((0, 1), (0, 2), (0, 3), (1, 2)))
    expected = np.array([[3, 3, 3, 3], [3, 5, 4, 0], [3, 4, 5, 0], [3, 0, 0, 9]]) / 12
    np.testing.assert_allclose(graph.matrix(0, 4), expected, rtol=0, atol=1e-15)


def test_uniform_weights_are_the_senders():
    matrix = tw.Star(weights="uniform").matrix(0, 4)
    expected = np.array([[1, 2, 2, 2], [1, 2, 0, 0], [1, 0, 2, 0], [1, 0, 0, 2]]) / 4
    np.testing.assert_allclose(matrix, expected, rtol=0, atol=1e-15)


# Distances of the time-varying graphs


def test_exponential_distances():
    assert distances(tw.Exponential(), 16) == [[1], [2], [4], [8]]
    assert distances(tw.Exponential(), 12, rank=7) == [[1], [2], [4], [8]]
    assert distances(tw.Exponential(peers=2), 27) == [[1, 2], [3, 6], [9, 18]]
    assert distances(tw.Exponential(peers=2), 6) == [[1, 2], [3]], "6 meets 0 and is left out"
    assert distances(tw.Exponential(peers=2, static=True), 27) == [[1, 2, 3, 6, 9, 18]]
    assert distances(tw.Exponential(bidirectional=True), 8) == [[1, 7], [2, 6], [4]], "no double edge across"


def test_alternating_exponential_distances():
    """As the scripts of Stochastic Gradient Push: both ways before the next power, and no distance twice."""
    assert distances(tw.Exponential(alternating=True), 16) == [[1], [15], [2], [14], [4], [12], [8]]
    assert distances(tw.Exponential(alternating=True), 3) == [[1], [2]]


@pytest.mark.parametrize("topology", [tw.Ring(), tw.DirectedRing(), tw.Star(), tw.ErdosRenyi()], ids=repr)
def test_a_mixing_matrix_is_the_graph_that_it_was_read_from(topology):
    copy = tw.MixingMatrix(topology.matrix(0, 6))
    for rank in range(6):
        assert copy.neighbours(rank, 5, 6) == topology.neighbours(rank, 5, 6)
    with pytest.raises(ValueError, match="6 rows cannot connect 5 workers"):
        copy.validate(5)


def test_watts_strogatz_of_odd_degree():
    lattice = nx.circulant_graph(12, [1])
    lattice.add_edges_from((i, (i + 2) % 12) for i in range(0, 12, 2))
    assert edges(as_networkx(tw.WattsStrogatz(degree=3, rewire=0.0), 12)) == edges(lattice)
    assert len(edges(as_networkx(tw.WattsStrogatz(degree=5, rewire=0.5), 12))) == 5 * 12


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 8, 12])
def test_watts_strogatz_of_the_largest_degree_is_complete(size):
    for degree in (size - 1, size):
        assert len(edges(as_networkx(tw.WattsStrogatz(degree=degree), size))) == size * (size - 1)


def test_a_degree_far_above_the_number_of_workers_costs_nothing(monkeypatch):
    draw, drawn = UniformStream.__call__, []
    monkeypatch.setattr(UniformStream, "__call__", lambda self, count: drawn.append(count) or draw(self, count))
    assert len(edges(as_networkx(tw.WattsStrogatz(degree=100_000), 4))) == 4 * 3
    assert drawn == [2 * 4]  # a number for each of the 2 edges ahead of each worker


@pytest.mark.parametrize("kind", [tw.Graph, tw.DirectedGraph])
def test_edges_to_ranks_that_are_not_there_are_refused_before_their_peers_are_listed(kind):
    graph = kind(edges=((0, 1_000), (1_000, 0)))
    with pytest.raises(ValueError, match="its edges name the ranks 0 to 1000; use 1001 workers"):
        graph.validate(4)
    assert vars(graph).keys() <= {"edges", "weights"}


@pytest.mark.parametrize("topology", [tw.Ring(), tw.Exponential(), tw.DirectedRing(), tw.Star()], ids=repr)
def test_news_reaches_all_in_as_many_rounds_as_its_matrices_need(topology):
    rounds = rounds_to_reach_all(topology, 9, 1)
    reached = [np.eye(9)]
    for step in range(1, 1 + rounds):
        reached.append(topology.matrix(step, 9) @ reached[-1])
    assert (reached[rounds] > 0).all() and not (reached[rounds - 1] > 0).all()


def test_linear_distances():
    assert distances(tw.Linear(), 8) == [[1], [7], [3], [5]]
    assert distances(tw.Linear(peers=2), 8) == [[1, 7], [3, 5]]
    assert distances(tw.Linear(peers=3), 8) == [[1, 7, 3], [5, 1, 7], [3, 5, 1], [7, 3, 5]]
    assert sorted(distances(tw.Linear(static=True), 8)[0]) == [1, 3, 5, 7]


def test_odd_exponential_distances():
    assert distances(tw.OddExponential(), 8) == [[1], [7], [3], [5]]
    assert distances(tw.OddExponential(), 32) == [[d % 32] for d in (1, -1, 3, -3, 5, -5, 9, -9, 17, -17)]
    assert distances(tw.OddExponential(peers=2), 16) == [[1, 15], [3, 13], [5, 11], [9, 7]]


@pytest.mark.parametrize(("kind", "left"), [(tw.OddExponential, 0.25), (tw.BipartiteExponential, 0.0)])
def test_what_is_left_of_the_distance_on_eight_workers(kind, left):
    """Of the worst start, after 4 and 12 steps: shifting all workers leaves 1/4 and 1/64, matching them nothing."""
    product = np.eye(8) - 1 / 8
    for step in range(12):
        product = kind().matrix(step, 8) @ product
        if step in (3, 11):
            assert np.linalg.norm(product, 2) == pytest.approx(left ** ((step + 1) // 4), abs=1e-12)


@pytest.mark.parametrize("kind", [tw.BipartiteLinear, tw.BipartiteExponential])
@pytest.mark.parametrize("size", [2, 4, 6, 10, 16])
def test_bipartite_graphs_are_matchings_of_active_with_passive(kind, size):
    for step in range(kind().period(size)):
        for rank in range(size):
            (peer,) = kind().neighbours(rank, step, size).sends
            assert kind.is_active(rank) != kind.is_active(peer)
            assert list(kind().neighbours(peer, step, size).sends) == [rank]


def test_bipartite_distances():
    assert distances(tw.BipartiteExponential(), 16, rank=1) == [[1], [15], [3], [13], [5], [11], [9], [7]]
    assert distances(tw.BipartiteExponential(), 32, rank=1) == [[d % 32] for d in (1, -1, 3, -3, 5, -5, 9, -9, 17, -17)]
    assert sorted(distances(tw.BipartiteLinear(), 12, rank=1)) == [[1], [3], [5], [7], [9], [11]]


# Schedules and hierarchy


def test_a_schedule_starts_each_phase_anew():
    schedule = tw.Phases(phases=((0, tw.Exponential(peers=2)), (1, tw.Exponential())), steps_per_epoch=3)
    assert [list(schedule.neighbours(0, step, 9).sends) for step in range(8)] == [
        *([1, 2], [3, 6], [1, 2]),
        *([1], [2], [4], [8], [1]),
    ]
    assert schedule.spectral_gap(9) == tw.Exponential().spectral_gap(9)
    assert list(schedule.steps(9)) == [0, 1, 3, 4, 5, 6]


def test_a_schedule_of_schedules():
    inner = tw.Phases(phases=((0, tw.Complete()), (2, tw.Exponential())))
    outer = tw.Phases(phases=((0, tw.Ring()), (5, inner)))
    assert [len(outer.neighbours(0, step, 8).sends) for step in (4, 5, 6, 7)] == [2, 7, 7, 1]
    assert eval(repr(outer), vars(tw)) == outer


def test_hierarchy_averages_within_and_gossips_between_nodes():
    topology = tw.Hierarchical(tw.Ring(), workers_per_node=3)
    expected = np.kron(tw.Ring().matrix(0, 4), np.full((3, 3), 1 / 3))
    np.testing.assert_allclose(topology.matrix(0, 12), expected, rtol=0, atol=1e-15)
    assert repr(topology) == "Hierarchical(Ring(), workers_per_node=3)"
    assert [topology.leader(rank) for rank in range(6)] == [0, 0, 0, 3, 3, 3]
    assert np.array_equal(tw.Hierarchical(tw.Ring(), 4).matrix(0, 4), np.full((4, 4), 0.25)), "one node averages"


# Random graphs


@pytest.mark.parametrize("kind", [tw.ErdosRenyi, tw.WattsStrogatz])
@pytest.mark.parametrize("size", [2, 5, 16, 64])
def test_random_graphs_are_connected_and_differ_by_seed(kind, size):
    graphs = [as_networkx(kind(seed=seed), size).to_undirected() for seed in range(8)]
    assert all(nx.is_connected(graph) for graph in graphs)
    assert size < 16 or len({frozenset(graph.edges) for graph in graphs}) == 8


def test_random_graphs_depend_on_nothing_but_their_seed():
    code = """if True:
        import random, sys
        import numpy as np
        from thinwire.topology import ErdosRenyi, WattsStrogatz
        random.seed(int(sys.argv[1])); np.random.seed(int(sys.argv[1])); before = np.random.get_state()[1].tolist()
        print([sorted(t.row(rank, 0, 24)) for t in (ErdosRenyi(), WattsStrogatz()) for rank in range(24)])
        assert np.random.get_state()[1].tolist() == before
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.run([sys.executable, "-c", code, seed], env=env, stdout=subprocess.PIPE, check=True) for seed in "12"
    ]
    assert runs[0].stdout == runs[1].stdout


def test_random_graphs_stay_as_they_are():
    """Golden: workers with different versions of NumPy must still agree."""
    assert sorted(tw.ErdosRenyi(seed=7).neighbours(0, 0, 12).sends) == GOLDEN_ERDOS_RENYI
    assert sorted(tw.WattsStrogatz(rewire=0.5, seed=7).neighbours(0, 0, 12).sends) == GOLDEN_WATTS_STROGATZ


GOLDEN_ERDOS_RENYI = [1, 3, 6, 7, 8]
GOLDEN_WATTS_STROGATZ = [3, 5, 9, 10]


def test_erdos_renyi_has_the_asked_density():
    degrees = [len(tw.ErdosRenyi(probability=0.2, seed=1).neighbours(rank, 0, 400).sends) for rank in range(400)]
    # 79800 pairs: the mean degree's standard deviation is 0.28, so this allows five
    assert np.mean(degrees) == pytest.approx(0.2 * 399, abs=1.4)


def test_watts_strogatz_keeps_its_edges_and_rewires_the_asked_share():
    size = 400
    lattice = edges(nx.circulant_graph(size, [1, 2, 3]))
    rewired = edges(as_networkx(tw.WattsStrogatz(degree=6, rewire=0.3), size))
    assert len(rewired) == len(lattice) == size * 6
    # 1200 edges at 0.3: standard deviation 0.013
    assert len(lattice - rewired) / len(lattice) == pytest.approx(0.3, abs=0.06)


# Impossible requests


@pytest.mark.parametrize(
    ("topology", "size", "message"),
    [
        (tw.Torus(), 7, r"Torus\(\) cannot connect 7 workers: 7 is prime.*use 6 or 8 workers"),
        (tw.Torus(), 3, "use 4 workers"),
        (tw.Torus(rows=4), 10, "rows of equal length"),
        (tw.Torus(rows=4), 4, "2 or more"),
        (tw.Hypercube(), 6, "power of two; use 4 or 8 workers"),
        (tw.BipartiteExponential(), 5, "must be even; use 4 or 6 workers"),
        (tw.BipartiteLinear(), 7, "must be even"),
        (tw.BipartiteLinear(peers=3), 4, "has 2 to choose from; use peers=2"),
        (tw.Exponential(peers=8), 8, "has 7 to choose from"),
        (tw.Linear(peers=5), 8, "has 4 to choose from"),
        (tw.DavisSouthernWomen(), 31, "has 32 members"),
        (tw.Graph(edges=((0, 1), (2, 3))), 4, r"disconnected: no path joins rank 0 both ways with the ranks \[2, 3\]"),
        (tw.Graph(edges=((0, 2),)), 3, r"disconnected.*\[1\]"),
        (tw.Graph(edges=((0, 1), (1, 2))), 4, "names? the ranks 0 to 2; use 3 workers"),
        (tw.DirectedGraph(edges=((0, 1), (1, 2), (2, 1))), 3, r"disconnected.*\[1, 2\]"),
        (tw.ErdosRenyi(probability=0.0), 4, "were all disconnected"),
        (tw.Hierarchical(tw.Ring(), workers_per_node=4), 6, "do not fill nodes of 4"),
        (tw.Hierarchical(tw.Torus(), workers_per_node=2), 14, "7 is prime"),
        (tw.Phases(phases=((0, tw.Ring()), (9, tw.Hypercube()))), 6, "power of two"),
    ],
    ids=str,
)
def test_impossible_numbers_of_workers(topology, size, message):
    for use in (topology.validate, topology.period, topology.spectral_gap, lambda size: topology.row(0, 0, size)):
        with pytest.raises(ValueError, match=message):
            use(size)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tw.Exponential(peers=0), "peers must be an integer, 1 or more"),
        (lambda: tw.Linear(peers=-1), "peers must be an integer, 1 or more"),
        (lambda: tw.BipartiteLinear(peers=0), "peers must be an integer, 1 or more"),
        (lambda: tw.Star(weights="heavy"), "weights must be one of metropolis, uniform, got 'heavy'"),
        (lambda: tw.ErdosRenyi(probability=1.5), "probability must be at least 0 and at most 1, or None, got 1.5"),
        (lambda: tw.ErdosRenyi(seed=-1), "seed must be an integer, 0 or more"),
        (lambda: tw.WattsStrogatz(degree=1), "degree must be an integer, 2 or more"),
        (lambda: tw.RandomPairs(num_steps=10**12), "num_steps must be an integer from 1 to 4096, got 1000000000000"),
        (lambda: tw.Exponential(alternating=True, static=True), "leave out static"),
        (lambda: tw.MixingMatrix([[1.0, 0.5], [0.0]]), "row 1 has 1 numbers, expected 2"),
        (lambda: tw.MixingMatrix([[0.5, 0.5], [0.4, 0.5]]), "column 0 sums to 0.9, expected 1"),
        (lambda: tw.MixingMatrix([[0.0, 1.0], [1.0, 0.0]]), "worker 0 must give itself"),
        (lambda: tw.MixingMatrix([[1.5, 0.0], [-0.5, 1.0]]), "weights are 0 to 1, got 1.5 in row 0, column 0"),
        (lambda: tw.MixingMatrix([[1.0, 0.0], [0.0, 1.0]]), "disconnected"),
        (lambda: tw.MixingMatrix(3), "W rows of W numbers"),
        (lambda: tw.WattsStrogatz(rewire=-0.1), "rewire must be at least 0 and at most 1"),
        (lambda: tw.Torus(rows=0), "rows"),
        (lambda: tw.Graph(edges=((0, 0),)), r"leave out the edge \(0, 0\)"),
        (lambda: tw.Graph(edges=((0, 1, 2),)), "pair of ranks"),
        (lambda: tw.DirectedGraph(edges=((0, "a"),)), "pair of ranks"),
        (lambda: tw.Phases(phases=()), "start at 0"),
        (lambda: tw.Phases(phases=((1, tw.Ring()),)), "start at 0"),
        (lambda: tw.Phases(phases=((0, tw.Ring()),), steps_per_epoch=0), "steps_per_epoch"),
        (lambda: tw.Hierarchical(tw.Ring(), workers_per_node=0), "workers_per_node"),
        (lambda: tw.from_networkx(nx.empty_graph(3)), "disconnected"),
    ],
)
def test_impossible_configurations(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# Documentation, facts and pictures


def test_the_documented_examples_run():
    assert doctest.testfile(str(DOCUMENT), module_relative=False).failed == 0


def test_the_documented_table_of_spectral_gaps():
    rows = [line.split("|")[1:-1] for line in DOCUMENT.read_text().splitlines() if line.count("|") == 8]
    assert len(rows) > 15
    for name, _, period, *gaps in rows[2:]:
        topology = eval(name.strip(" `"), vars(tw))
        assert topology.period(32) == int(period)
        for size, gap in zip((8, 16, 32, 64), gaps, strict=True):
            assert not gap.strip() or topology.spectral_gap(size) == pytest.approx(float(gap), abs=6e-5)


def test_facts():
    facts = dict(tw.describe(tw.Exponential(), 16))
    assert (facts["graph"], facts["peers per step"], facts["messages per step"]) == (
        "directed, repeats every 4 steps",
        "1",
        "16",
    )
    assert (facts["mixing matrix"], facts["agreement"]) == ("doubly stochastic, not symmetric", "exact after 4 steps")
    steps = float(re.fullmatch("ten times closer every (.*) steps", dict(tw.describe(tw.Ring(), 16))["agreement"])[1])
    assert (1 - tw.Ring().spectral_gap(16)) ** steps == pytest.approx(0.1, rel=0.01)


def test_facts_of_a_hierarchy_count_what_leaders_send():
    facts = dict(tw.describe(tw.Phases(phases=((0, tw.Hierarchical(tw.Ring(), 4)),)), 32))
    assert (facts["peers per step"], facts["messages per step"]) == ("0 to 2", "16")


def test_describe_says_what_push_sum_is_for():
    assert ("mixing matrix", "column-stochastic (use push-sum), not symmetric") in tw.describe(
        tw.Star(weights="uniform"), 5
    )


@pytest.mark.parametrize(
    ("topology", "size", "kind", "start"),
    [
        (tw.Exponential(), 16, "png", b"\x89PNG"),
        (tw.Ring(), 1, "svg", b"<?xml"),
        (tw.Linear(), 40, "png", b"\x89PNG"),
        (tw.Hierarchical(tw.DirectedRing(), 4), 12, "pdf", b"%PDF"),
    ],
    ids=str,
)
def test_draw(topology, size, kind, start, tmp_path):
    assert tw.draw(topology, size, tmp_path / f"picture.{kind}").read_bytes().startswith(start)


def test_draw_refuses_other_files(tmp_path):
    with pytest.raises(ValueError, match=r"must end in .pdf, .png, .svg"):
        tw.draw(tw.Ring(), 4, tmp_path / "ring.jpeg")
