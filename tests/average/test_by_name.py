"""A policy by parameter name: equal to its children, one transaction, and mistakes at the start."""

from __future__ import annotations

import pytest
import torch
from helpers.gradients import batch, fingerprint, make_model, train
from helpers.spawn import WORLDS
from test_mean import SHAPES, gradients, memories, run_steps
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

SPARSE = tw.Mean(tw.TopK(0.1), tw.ErrorFeedback())
FOUR_BITS = tw.Mean(tw.QSGD(bits=4), tw.ErrorFeedback())
CHILDREN = [
    tw.Mean(),
    SPARSE,
    FOUR_BITS,
    tw.Mean(tw.QSGD(bits=4), exchange="scatter_reduce"),
    tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), granularity="model"),
    tw.Mean(tw.ALQ(bucket_size=64, update_steps=(1,))),
    tw.Mean(tw.codec.CoarseGrainedTopK(0.5, chunk=16), tw.ErrorFeedback()),
    tw.PowerSGD(rank=2),
    tw.dgc(ratio=0.1, warmup_epochs=0),
]


def steps_and_bytes(comm, averager):
    before = comm.ledger.bytes_sent
    state = averager.init(gradients(comm.rank, 0), comm, seed=5)
    begun = comm.ledger.bytes_sent
    assert begun >= before
    results = []
    for step in range(4):
        tensors = gradients(comm.rank, step)
        averager.step(state, tensors, comm).wait()
        assert averager.commit(state)
        results.append([t for _, t in tensors])
    return results, comm.ledger.bytes_sent - begun, comm.ledger.dense_fp32_bytes, memories(state.state_dict())


# In processes one child of each order of collectives.
ALONE = [("threads", child) for child in CHILDREN] + [("processes", SPARSE), ("processes", tw.PowerSGD(rank=2))]


@pytest.mark.parametrize("world, child", ALONE, ids=repr)
def test_one_pattern_for_all_is_the_child_alone(world, child):
    """Results, bytes and memory, bit for bit."""
    alone = WORLDS[world](3, steps_and_bytes, child)
    policy = WORLDS[world](3, steps_and_bytes, tw.ByName({"*": child}))
    for (a, *bytes_a, memory_a), (b, *bytes_b, memory_b) in zip(alone, policy, strict=True):
        assert all(torch.equal(x, y) for s, t in zip(a, b, strict=True) for x, y in zip(s, t, strict=True))
        assert bytes_a == bytes_b
        assert memory_a.keys() == memory_b.keys()
        assert all(torch.equal(memory_a[name], memory_b[name]) for name in memory_a)


def results_of(comm, averager):
    return run_steps(comm, averager)[0]


def part_of(comm, averager, names):
    """What an averager makes of these tensors alone."""
    pick = [[pair for pair in gradients(comm.rank, step) if pair[0] in names] for step in range(4)]
    state = averager.init(pick[0], comm, seed=5)
    for tensors in pick:
        averager.step(state, tensors, comm).wait()
        averager.commit(state)
    return dict(pick[3])


@pytest.mark.parametrize("world", WORLDS)
def test_every_tensor_gets_what_its_own_averager_makes_of_it(world):
    """The first matching pattern wins: conv.bias matches the second and the third."""
    policy = tw.ByName({"fc*": SPARSE, "*.bias": tw.Mean(), "conv*": FOUR_BITS, "*": tw.PowerSGD(rank=1)})
    got = dict(zip(SHAPES, WORLDS[world](3, results_of, policy)[0][3], strict=True))
    for averager, name in ((SPARSE, "fc.weight"), (tw.Mean(), "conv.bias"), (FOUR_BITS, "conv.weight")):
        assert torch.equal(got[name], WORLDS[world](3, part_of, averager, [name])[0][name])


def bucket_by_bucket(comm, averager):
    """A call for each tensor, as small DDP buckets make: most children own nothing of a call."""
    state = averager.init(gradients(comm.rank, 0), comm, seed=5)
    for step in range(2):
        tensors = gradients(comm.rank, step)
        for handle in [averager.step(state, [pair], comm) for pair in tensors]:
            handle.wait()
        assert averager.commit(state)
    return [t for _, t in tensors]


def all_at_once(comm, averager):
    return run_steps(comm, averager, 2)[0][1]


@pytest.mark.parametrize(
    "policy",
    [
        tw.ByName({"fc*": SPARSE, "*": FOUR_BITS}),
        tw.ByName({"fc*": FOUR_BITS, "*": tw.Mean(exchange="scatter_reduce")}),
    ],
    ids=repr,
)
def test_buckets_change_nothing(policy):
    for apart, together in zip(
        tw.LocalWorld(3).run(bucket_by_bucket, policy), tw.LocalWorld(3).run(all_at_once, policy), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


def test_a_child_that_is_not_finite_discards_the_round_of_all():
    policy = tw.ByName({"fc*": SPARSE, "*": FOUR_BITS})

    def worker(comm):
        state = policy.init(gradients(comm.rank, 0), comm, seed=5)
        finite = []
        for step in range(3):
            tensors, before = gradients(comm.rank, step), memories(state.state_dict())
            if step == 1 and comm.rank == 2:
                dict(tensors)["conv.weight"][0, 0, 0, 0] = float("inf")  # of the second child
            policy.step(state, tensors, comm).wait()
            assert dict(tensors)["fc.weight"].isfinite().all()
            finite.append(policy.commit(state))
            same = all(torch.equal(before[name], kept) for name, kept in memories(state.state_dict()).items())
            assert same == (step == 1)
            assert [child.progress.step for child in state.children.values()] == [step + 1] * 2
        return finite

    assert tw.LocalWorld(3).run(worker) == [[True, False, True]] * 3


def ddp_worker(comm, averager, bucket_cap_mb):
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=bucket_cap_mb)
    handle = tw.compress_gradients(ddp, averager, seed=3)
    train(ddp, comm.rank, parameters=ddp.module)
    names = sorted(name.partition("residual.")[2] for name in memories(handle.state_dict()))
    handle.detach()
    return fingerprint(ddp.module), names


@pytest.mark.parametrize(
    "policy, names",
    [
        (tw.ByName({"head*": SPARSE, "*": tw.Mean(tw.QSGD(bits=4))}), ["head.weight"]),
        (tw.ByName({"head*": tw.PowerSGD(rank=1), "*": SPARSE}), ["head.weight", "left.weight", "right.weight"]),
        (
            tw.ByName({"head*": tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), granularity="model"), "*": tw.Mean()}),
            ["head.weight"],
        ),
    ],
    ids=repr,
)
def test_under_ddp_with_many_buckets(policy, names):
    """Replicas stay equal; buckets of DDP, rebuilt after the first step, give what one bucket gives."""
    many = WORLDS["processes"](2, ddp_worker, policy, 0.002)
    one = WORLDS["processes"](2, ddp_worker, policy, 25)
    assert len({h for h, _ in many + one}) == 1
    assert many[0][1] == names


def test_resumed_state_is_the_same_state(tmp_path):
    policy = tw.ByName(
        {"head*": tw.PowerSGD(rank=1), "*": tw.Mean(tw.TopK(tw.schedule.GeometricWarmup(0.1)), tw.ErrorFeedback())}
    )

    def worker(comm, resume):
        model = make_model()
        handle = tw.compress_gradients(model, policy, comm=comm)
        handle.set_epoch(2)
        train(model, comm.rank, steps=3)
        if resume:
            torch.save(handle.state_dict(), tmp_path / f"{comm.rank}.pt")
            handle.detach()
            handle = tw.compress_gradients(model, policy, comm=comm)
            handle.load_state_dict(torch.load(tmp_path / f"{comm.rank}.pt", weights_only=True))
        train(model, comm.rank, steps=3)
        handle.detach()
        return fingerprint(model)

    assert tw.LocalWorld(2).run(worker, True) == tw.LocalWorld(2).run(worker, False)


def test_local_updates_take_it():
    policy = tw.ByName({"head*": FOUR_BITS, "*": tw.Mean()})

    def worker(comm):
        model = make_model(seed=comm.rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = tw.local_updates(model, optimizer, policy, every=2, comm=comm)
        for step in range(4):
            x, y = batch(comm.rank, step)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        handle.detach()
        return fingerprint(model)

    assert len(set(tw.LocalWorld(3).run(worker))) == 1


def test_fragments_of_local_updates_need_not_have_every_pattern():
    """A pattern needs a parameter in the model, not in each of its fragments."""

    def worker(comm, strategy):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, strategy, comm=comm) as handle:
            torch.manual_seed(comm.rank)
            for _ in range(4):
                optimizer.zero_grad()
                sum(p.square().sum() * torch.rand(()) for p in model.parameters()).backward()
                optimizer.step()
            handle.synchronize()
            handle.load_state_dict(handle.state_dict())
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    last = [name for name, _ in make_model().named_parameters()][-1]
    policy = tw.ByName({last: tw.Mean(tw.Cast()), "*": tw.Mean()})
    results = tw.LocalWorld(2, timeout_seconds=30).run(worker, tw.Local(policy, every=4, fragments=2))
    assert torch.equal(results[0], results[1])
    policy = tw.ByName({"nothing*": tw.Mean(), "*": tw.Mean()})
    for strategy in (tw.Local(policy, every=4, fragments=2), tw.Gossip(policy)):
        with pytest.raises(ValueError, match=r"pattern 'nothing\*' gets no parameter"):
            tw.LocalWorld(2, timeout_seconds=30).run(worker, strategy)


def test_mistakes_of_the_constructor():
    for build, message in (
        (lambda: tw.ByName({}), "at least one pattern"),
        (lambda: tw.ByName(tw.Mean()), r"averagers must be a dict such as .*got Mean\(\)"),
        (lambda: tw.ByName({"": tw.Mean()}), "a pattern must be a text"),
        (lambda: tw.ByName((("*", tw.Mean()), ("*", SPARSE))), r"give each pattern once, got \['\*', '\*'\]"),
        (lambda: tw.ByName({"*": tw.TopK(0.1)}), r"averager of '\*' must give all workers one mean.*got TopK"),
        (lambda: tw.ByName({"*": tw.Mix(tw.Ring())}), r"averager of '\*' must give all workers one mean.*got Mix"),
        (
            lambda: tw.ByName({"a*": tw.dgc(), "*": tw.Mean()}),
            r"averagers of \['a\*'\] apply momentum and the others do not",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def test_mistakes_found_when_attaching():
    def worker(comm):
        for policy, message in (
            (tw.ByName({"head*": tw.Mean()}), r"no pattern for \['left.weight'.*add '\*' as the last pattern"),
            (tw.ByName({"embed*": SPARSE, "*": tw.Mean()}), r"pattern 'embed\*' gets no parameter: the parameters are"),
            (tw.ByName({"*": SPARSE, "head*": tw.Mean()}), r"pattern 'head\*' gets no parameter: earlier patterns"),
        ):
            with pytest.raises(ValueError, match=f"rank {comm.rank}: .*{message}"):
                tw.compress_gradients(make_model(), policy, comm=comm)
        other = tw.ByName({"*": tw.Mean()} if comm.rank else {"*": tw.Mean(tw.Cast())})
        with pytest.raises(ValueError, match=r"averager.*ByName\(\{'\*': Mean\(Cast\(\)\)\}\)"):
            tw.compress_gradients(make_model(), other, comm=comm)
        return True

    assert all(tw.LocalWorld(2, timeout_seconds=30).run(worker))


def test_it_suits_parameters_if_all_children_do():
    assert tw.ByName({"a*": tw.Mean(), "*": tw.Mean()}).traits.suits_parameters
    assert not tw.ByName({"a*": tw.Mean(), "*": SPARSE}).traits.suits_parameters


def test_equal_by_value_and_by_order():
    a, b = tw.Mean(), tw.Mean(tw.Cast())
    assert tw.ByName({"x": a, "*": b}) == tw.ByName((("x", a), ("*", b)))
    assert tw.ByName({"x": a, "*": b}) != tw.ByName({"*": b, "x": a})
    assert hash(tw.ByName({"*": a})) == hash(tw.ByName({"*": a}))
