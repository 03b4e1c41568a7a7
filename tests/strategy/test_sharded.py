"""Strategies on models under `fully_shard`, and on tensor-parallel ones, in real processes."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from helpers import traffic
from helpers.sharded import SPARSE, batch, fingerprint, loss_of, replicas_are_equal, sharded, train
from helpers.spawn import device_mesh, spawn
from helpers.traffic import bytes_sent_to
from torch import nn

import thinwire as tw
from thinwire.strategy.gradients.shard_compression import _sizes


def between_replicas(comm, mesh, before, after):
    """Bytes that this worker has sent to other replicas."""
    replicas = comm.gather_objects(mesh.get_coordinate()[0])
    own = replicas[comm.rank]
    return sum(b - a for a, b, replica in zip(before, after, replicas, strict=True) if replica != own)


def saving_worker(comm, replicas, shards):
    torch.set_num_threads(1)
    mesh = device_mesh(replicas, shards)
    dense, thin = sharded(mesh, width=192), sharded(mesh["shard"], seed=mesh.get_coordinate()[0], width=192)
    handle = tw.compress_gradients(thin, SPARSE, replicas=mesh["replicate"])
    assert replicas_are_equal(comm, mesh, thin)  # different seeds: attaching has made them equal to replica 0's
    counts, losses = [bytes_sent_to(comm)], []
    for model in (dense, thin):
        train(model, comm.rank, steps=24, extra=lambda rank, step: step % 3 > 0)
        counts.append(bytes_sent_to(comm))
        losses.append(loss_of(model))
    assert replicas_are_equal(comm, mesh, thin)
    dense_bytes, thin_bytes = (between_replicas(comm, mesh, *counts[i : i + 2]) for i in (0, 1))
    counted = handle.ledger.bytes_sent
    handle.detach()
    return losses, dense_bytes, thin_bytes, counted


def test_hsdp_sends_25_times_fewer_bytes_between_replicas_for_the_same_loss():
    results = spawn(4, saving_worker, 2, 2)
    dense_loss, thin_loss = results[0][0]
    assert thin_loss < 1.02 * dense_loss
    assert sum(r[1] for r in results) > 25 * sum(r[2] for r in results) > 0


def gradients(model):
    return [torch.empty(0) if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]


def backward(model, rank, step, **options):
    x, y = batch(rank, step)
    nn.functional.cross_entropy(model(x, **options), y).backward()


def memory_of(handle):
    (state,) = handle.state_dict().values()
    return {name: part.clone() for name, part in state["memory"]["residual"].items()}


def semantics_worker(comm):
    """What a shard's average must have in common with that of a whole parameter; one world, for meshes cannot be made twice."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    mesh = device_mesh(2, 2)
    replicas, replica = mesh["replicate"], mesh.get_coordinate()[0]
    dense, thin = sharded(mesh), sharded(mesh["shard"], seed=replica)

    # The mean over replicas is that of dense HSDP; a layer that one replica leaves out counts as zero there.
    with tw.compress_gradients(thin, tw.Mean(), replicas=replicas) as handle:
        for model in (dense, thin):
            backward(model, comm.rank, 0)
        for a, b in zip(gradients(dense), gradients(thin), strict=True):
            torch.testing.assert_close(a, b)
        thin.zero_grad()
        backward(thin, comm.rank, 1, extra=replica == 0)
        assert all(p.grad is not None for p in thin.extra.parameters())
        thin.zero_grad()

        # Accumulation: unsharded, in shards, and in one pass give the same sum.
        sums = []
        for first in (thin.set_requires_gradient_sync, None):
            if first is not None:
                first(False)
                backward(thin, comm.rank, 2)
                assert all(p.grad is None for p in thin.parameters())
                first(True)
            else:
                with handle.no_sync():
                    backward(thin, comm.rank, 2)
            backward(thin, comm.rank, 3)
            sums.append(gradients(thin))
            thin.zero_grad()
        torch.testing.assert_close(*sums)

    # A penalty on the shards, whose gradients come before FSDP's or after them.
    def layers(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        return model

    def losses(model):
        shards, x = list(model.parameters()), torch.full((2, 4), 1.0 + comm.rank)
        return [lambda: model(x).square().sum(), lambda: sum(p.square().sum() for p in shards).full_tensor()]

    for order in (1, -1):
        dense_layers, thin_layers = layers(mesh), layers(mesh["shard"])
        with tw.compress_gradients(thin_layers, tw.Mean(), replicas=replicas):
            for model in (dense_layers, thin_layers):
                sum(part() for part in losses(model)[::order]).backward()
            torch.testing.assert_close(gradients(thin_layers), gradients(dense_layers))
    thin_layers.zero_grad()
    with tw.compress_gradients(thin_layers, tw.Mean(), replicas=replicas, bucket_bytes=1) as handle:
        loss, squares = losses(thin_layers)
        with handle.no_sync():
            squares().backward()
        loss().backward()
        torch.testing.assert_close(gradients(thin_layers), gradients(dense_layers))
        with pytest.raises(ValueError, match=r"gradient of '1\.bias' went on growing after it was sent.*no_sync\(\)"):
            (squares() + loss()).backward()

    # Sparse training with clipping; a loss without gradients of one layer on one replica; evaluation between the steps.
    with tw.compress_gradients(thin, SPARSE, replicas=replicas) as handle:
        optimizer = torch.optim.SGD(thin.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            backward(thin, comm.rank, step, extra=(step + replica) % 2 == 0)
            with torch.no_grad():
                thin(batch(0, 0)[0])  # leaves the root's parameters gathered
            norm = nn.utils.clip_grad_norm_(thin.parameters(), 1.0).full_tensor()
            assert len(set(comm.gather_objects(norm.item()))) == 1
            optimizer.step()
            optimizer.zero_grad()
        assert replicas_are_equal(comm, mesh, thin)
        held = memory_of(handle)
        assert sum(m.numel() for m in held.values()) <= sum(p.to_local().numel() for p in thin.parameters())
        assert any(m.any() for m in held.values())

        # An infinite gradient, in a shard that two workers hold: nobody steps, and no memory changes.
        before = fingerprint(thin)
        if mesh.get_coordinate()[1]:
            backward(thin, comm.rank, 7, poison=comm.rank == 3)
        else:
            with pytest.warns(RuntimeWarning, match="not finite and is skipped"):
                backward(thin, comm.rank, 7)
        optimizer.step()
        assert handle.num_skipped == 1 and fingerprint(thin) == before
        assert all(torch.equal(held[name], m) for name, m in memory_of(handle).items())

    # The layers of each shard get codecs of their own: the workers that hold this shard choose them together.
    fitted = tw.Mean(tw.Fitted(4.0, measure_steps=(1, 3)), tw.ErrorFeedback())
    with tw.compress_gradients(thin, fitted, replicas=replicas) as handle:
        train(thin, comm.rank, steps=5)
        assert replicas_are_equal(comm, mesh, thin)
        chosen = comm.gather_objects(handle.diagnostics())
        assert chosen[0] == chosen[2] and chosen[1] == chosen[3]  # replicas of shard 0 and of shard 1
        assert all(found["bits"] <= 4 and "error" in found for found in chosen)

    # The same for parameters and their changes; a worker's own step is skipped on all of its shards.
    for attach in (
        lambda optimizer: tw.local_updates(thin, optimizer, SPARSE, every=2, replicas=replicas),
        lambda optimizer: tw.gossip_parameters(thin, optimizer, tw.Mix(), replicas=replicas),
        lambda optimizer: tw.gossip_parameters(thin, optimizer, tw.Choco(tw.Ring(), tw.TopK(0.2)), replicas=replicas),
    ):
        optimizer = torch.optim.AdamW(thin.parameters(), lr=0.01)
        with attach(optimizer) as handle:
            train(thin, comm.rank, steps=4, optimizer=optimizer)
            before = fingerprint(thin)
            if isinstance(handle, tw.strategy.ParameterGossip):
                distances = comm.gather_objects(handle.consensus_distance())
                assert len(set(distances)) == 1
                whole = torch.cat([t.full_tensor().double().reshape(-1) for t in thin.parameters()])
                models = torch.tensor(comm.gather_objects(whole.tolist()), dtype=torch.float64)
                apart = (models - models.mean(0)).square().sum(1).mean().sqrt().item()
                assert distances[0] == pytest.approx(apart, rel=1e-12)
                with handle.average_model():
                    assert replicas_are_equal(comm, mesh, thin)
                    held_mean = loss_of(thin)
                assert len(set(comm.gather_objects(held_mean))) == 1
                assert fingerprint(thin) == before
            else:
                assert replicas_are_equal(comm, mesh, thin)
            backward(thin, comm.rank, 7, poison=comm.rank == 1)
            optimizer.step()
            optimizer.zero_grad()
            assert comm.gather_objects(handle.num_skipped) == [1, 1, 0, 0]

    for options, message in (
        ({}, r"'bias' is a DTensor over a mesh of \(2,\).*replicas=mesh\['replicate'\]"),
        ({"replicas": mesh["shard"]}, r"holds rank \[[0-3]\] of another replica"),
        ({"replicas": mesh}, "a device mesh of one dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            tw.compress_gradients(thin, SPARSE, **options)
    with pytest.raises(
        ValueError,
        match=r"gradients are averaged densely already; shard over one dimension only, before a trainer does",
    ):
        tw.compress_gradients(dense, SPARSE, replicas=replicas)
    with pytest.raises(ValueError, match="'bias' is a DTensor, and Asynchronous needs"):
        tw.gossip_asynchronously(thin, torch.optim.SGD(thin.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="every: 2 on rank 0; 3 on rank 1"):  # of the workers of one replica
        optimizer = torch.optim.SGD(thin.parameters(), lr=0.1)
        tw.local_updates(thin, optimizer, tw.Mean(), every=2 + mesh.get_coordinate()[1], replicas=replicas)
    thin.extra.weight.requires_grad_(comm.rank % 2 == 0)  # of one shard, in both replicas
    with pytest.raises(
        ValueError, match=r"1 of \d+ settings:\s+'extra.weight' is trained: True on rank 0; False on rank 1"
    ):
        tw.compress_gradients(thin, SPARSE, replicas=replicas)
    late = nn.Linear(4, 4)
    with tw.compress_gradients(late, SPARSE):
        fully_shard(late, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(late.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="'weight' was replaced after Gradients attached.*shard the model first"):
            optimizer.step()
    partly = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(partly[0], mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"'1\.weight' is trained, and lies outside of all modules under fully_shard"):
        tw.compress_gradients(partly, SPARSE, replicas=replicas)


def test_shards_are_averaged_as_whole_parameters_are():
    spawn(4, semantics_worker)


def pipeline_worker(comm):
    """FSDP reduces at the end of a pipeline's step, outside of backward passes."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = device_mesh(2, 2, 1, names=("replicate", "shard", "pipe"))
    dense, (x, y) = sharded(mesh["replicate", "shard"]), batch(comm.rank, 0)
    backward(dense, comm.rank, 0)
    for within_no_sync in (False, True):
        model = sharded(mesh["shard"])
        stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=mesh["pipe"].get_group())
        schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.cross_entropy)
        with tw.compress_gradients(model, tw.Mean(), replicas=mesh["replicate"]) as handle:
            if within_no_sync:
                with handle.no_sync():
                    schedule.step(x, target=y)
                parameters = list(model.parameters())
                torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])
                torch.testing.assert_close(gradients(model), gradients(dense))
            else:
                with pytest.raises(ValueError, match=r"came outside of a backward pass, .* within no_sync\(\)"):
                    schedule.step(x, target=y)


def test_replicas_of_a_pipelines_stage_are_averaged():
    spawn(4, pipeline_worker)


def parallel_worker(comm):
    """Tensor parallelism inside a replica: columns of one layer, rows of the next, a norm that each worker holds whole."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    mesh = device_mesh(2, 2, names=("replicate", "tensor"))
    whole = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    torch.manual_seed(mesh.get_coordinate()[0])
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    with tw.compress_gradients(model, SPARSE, replicas=mesh["replicate"]) as handle:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            backward(model, mesh.get_coordinate()[0], step)
            optimizer.step()
            optimizer.zero_grad()
        held = {name: p.to_local().numel() for name, p in model.named_parameters() if p.ndim > 1}
        assert {name: m.numel() for name, m in memory_of(handle).items()} == held
        whole_parameters = [p.full_tensor().tolist() for p in model.parameters()]
        assert all(other == whole_parameters for other in comm.gather_objects(whole_parameters))
        model.to("cpu")  # changes nothing, but for the hooks of DTensors
        backward(model, mesh.get_coordinate()[0], 3)
        with pytest.raises(
            ValueError, match=r"'0\.weight' was given other contents .*, as model\.to\(\) does to a DTensor"
        ):
            optimizer.step()
    with tw.compress_gradients(model, tw.Mean(), replicas=mesh["replicate"]):
        optimizer.zero_grad()
        backward(model, mesh.get_coordinate()[0], 4)
        averaged = [p.grad.full_tensor().tolist() for p in model.parameters()]
        assert all(other == averaged for other in comm.gather_objects(averaged))

    # The gradient of an embedding in rows is a sum over the workers of the replica still due, and no shard.
    torch.manual_seed(0)
    language = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7))
    reference = copy.deepcopy(language)
    parallelize_module(language, mesh["tensor"], {"0": RowwiseParallel(input_layouts=Replicate())})
    words = torch.tensor([0, 1, 2, 5])
    with tw.compress_gradients(language, tw.Mean(), replicas=mesh["replicate"]):
        for model in (language, reference):
            nn.functional.cross_entropy(model(words), (words + 1) % 7).backward()
    torch.testing.assert_close(language[0].weight.grad.full_tensor(), reference[0].weight.grad)
    for averager in (
        tw.Mean(tw.Fitted(4.0), tw.ErrorFeedback()),
        tw.Mean(tw.TopK(0.1), tw.ErrorFeedback(), granularity="bucket"),
    ):
        with pytest.raises(ValueError, match=r"several workers of a replica hold '1\.weight'.* would drift apart"):
            tw.compress_gradients(language, averager, replicas=mesh["replicate"])

    # A plain parameter whose gradient is a DTensor.
    mixed = nn.Linear(2, 4)
    mixed.weight = nn.Parameter(distribute_tensor(mixed.weight.detach(), mesh["tensor"], [Shard(0)]))
    with tw.compress_gradients(mixed, tw.Mean(), replicas=mesh["replicate"]), implicit_replication():
        mixed(torch.full((1, 2), float(mesh.get_coordinate()[0]))).sum().backward()
    assert mixed.weight.grad.full_tensor().tolist() == [[0.5, 0.5]] * 4

    # Layouts that do not correspond: one replica shards by columns, the other by rows.
    weight = distribute_tensor(whole[0].weight.detach(), mesh["tensor"], [Shard(mesh.get_coordinate()[0])])
    whole[0].weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match=r"(?s)shards of the replicas do not correspond.*layout of '0\.weight'"):
        tw.compress_gradients(whole, SPARSE, replicas=mesh["replicate"])


def test_tensor_parallel_shards_are_averaged_where_they_correspond():
    spawn(4, parallel_worker)


def shard_worker(comm):
    """Encoded collectives inside one model, against FSDP's own."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    mesh = device_mesh(4, names=("shard",))
    dense, thin = sharded(mesh, width=192), sharded(mesh, width=192)
    exact = sharded(mesh, reshard_after_forward=False)
    for model in (dense, thin):
        backward(model, comm.rank, 0)  # connects FSDP's groups
        model.zero_grad()

    # Unbiased: the mean of many encoded gradients is the gradient; gathered weights are the same in forward and backward.
    backward(exact, comm.rank, 0)
    expected = gradients(exact)
    with tw.compress_shards(exact, gradients=tw.QSGD(bits=4), parameters=None) as handle:
        totals = [torch.zeros_like(g) for g in expected]
        errors = []
        for _ in range(30):
            exact.zero_grad()
            backward(exact, comm.rank, 0)
            for total, g in zip(totals, gradients(exact), strict=True):
                total += g / 30
            difference = torch.cat([(t - e).flatten() for t, e in zip(gradients(exact), expected, strict=True)])
            errors.append(difference.norm().item())
        mean_error = torch.cat([(t - e).flatten() for t, e in zip(totals, expected, strict=True)]).norm().item()
        assert 0 < 3 * mean_error < sum(errors) / 30  # 1/sqrt(30) of one error
    exact.zero_grad()
    backward(exact, comm.rank, 0)  # detached: dense again
    torch.testing.assert_close(gradients(exact), expected)

    # Parameters alone: gradients stay dense, and yet each step rounds parameters with random numbers of its own.
    found = []
    with tw.compress_shards(exact, gradients=None, parameters=tw.QSGD(bits=4)) as handle:
        for _ in range(2):
            exact.zero_grad()
            backward(exact, comm.rank, 0)
            found.append(gradients(exact))
        assert handle.state_dict() == {"": 2, "hidden": 2}
        assert not handle.ledger.collectives.keys() & {"all_to_all"}
    assert any(not torch.equal(a, b) for a, b in zip(*found, strict=True))

    del handle
    gc.collect()  # bytes of a connection that closes later would be missing in the counts
    counts, losses = [sum(bytes_sent_to(comm))], []
    handle = tw.compress_shards(thin, gradients=tw.QSGD(bits=4), parameters=tw.QSGD(bits=4))
    for model in (dense, thin):
        train(model, comm.rank, steps=20)
        counts.append(sum(bytes_sent_to(comm)))
        losses.append(loss_of(dense if model is dense else _exactly(thin, dense)))
        counts[-1:] = [counts[-1], sum(bytes_sent_to(comm))]
    dense_bytes, thin_bytes = counts[1] - counts[0], counts[3] - counts[2]
    ledger = handle.ledger
    assert ledger.bytes_sent < thin_bytes < 1.15 * ledger.bytes_sent  # Gloo's headers, and the connection
    assert ledger.dense_fp32_bytes <= 1.01 * dense_bytes  # Gloo's reduce-scatter sends more than it needs to
    assert ledger.collectives["all_gather"].bytes_sent > 0 and ledger.collectives["all_to_all"].bytes_sent > 0
    assert handle.state_dict() == {"": 20, "hidden": 20}
    handle.detach()
    with pytest.raises(ValueError, match="is biased"):
        tw.compress_shards(thin, gradients=tw.TopK(0.1))
    # Two forward passes, then two backward passes: each gathers the bits that its forward pass did.
    layer = nn.Linear(4, 4, bias=False)
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    with tw.compress_shards(layer, parameters=tw.QSGD(bits=2)):
        passes = [torch.eye(4, requires_grad=True) for _ in range(2)]
        outputs = [layer(x) for x in passes]
        for x, output in zip(passes, outputs, strict=True):
            output.backward(torch.eye(4))
            assert torch.equal(x.grad, output.t())  # the weights of the backward pass, and of the forward pass
    halves = sharded(mesh, reshard_after_forward=2)
    with tw.compress_shards(halves), pytest.raises(ValueError, match="no number as reshard_after_forward"):
        backward(halves, comm.rank, 0)
    return ledger.dense_fp32_bytes, thin_bytes, losses


def groups_worker(comm):
    """Two groups of the same workers, as `set_separate_reduce_scatter_group` also makes."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for part in (model[1], model):
        fully_shard(part, mesh=device_mesh(2, 2)["shard"])
    with tw.compress_shards(model) as handle:
        model(torch.ones(2, 4)).square().sum().backward()
        return handle.state_dict()


def test_groups_of_the_same_workers_share_the_encoded_communication():
    assert spawn(4, groups_worker) == [{"": 1, "1": 1}] * 4


def mistaken_worker(comm):
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=device_mesh(2))
    with pytest.raises(
        ValueError, match="Shards: the optimizer has no parameter of the model.*make it after fully_shard"
    ):
        tw.attach(model, optimizer, tw.Shards())
    model.bias.requires_grad_(comm.rank == 0)
    with (
        tw.compress_shards(model),
        pytest.raises(ValueError, match="'bias' is trained: True on rank 0; False on rank 1"),
    ):
        model(torch.ones(2, 4))


def test_shards_refuse_an_optimizer_of_old_parameters_and_what_one_worker_alone_has_frozen():
    spawn(2, mistaken_worker)


def old_fsdp_worker(comm):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for strategy in (tw.Gradients(tw.Mean()), tw.Local(tw.Mean(), every=2), tw.Gossip(tw.Mix())):
        with pytest.raises(ValueError, match="the model is in FullyShardedDataParallel.*fully_shard instead"):
            tw.attach(model, optimizer, strategy)


def test_a_model_in_fully_sharded_data_parallel_is_refused():
    spawn(2, old_fsdp_worker)


def _exactly(source, target):
    """`target` with the shards of `source`, to be evaluated without encoding."""
    with torch.no_grad():
        for a, b in zip(source.parameters(), target.parameters(), strict=True):
            b.to_local().copy_(a.to_local())
    return target


def test_fsdp_with_4_bits_sends_7_times_fewer_bytes():
    results = spawn(4, shard_worker)
    assert sum(dense for dense, *_ in results) > 7 * sum(thin for _, thin, _ in results)
    dense_loss, thin_loss = results[0][2]
    assert thin_loss < 1.05 * dense_loss


def test_a_worker_chooses_no_more_memory_than_the_codec_bounds():
    """Sizes travel first where they depend on the data; rank 1 announces 9 bytes to all, where 8 are the most."""

    def worker(comm):
        return _sizes(comm, [torch.zeros(8 + comm.rank)] * 2, limit=8)

    with pytest.raises(tw.comm.CommunicationError, match="rank 1 announced 9 elements, expected 0 to 8"):
        tw.LocalWorld(2).run(worker)


def test_bytes_are_counted_where_two_processes_use_the_same_local_port(monkeypatch):
    """Linux gives one local port to connections that have different listeners; see `bytes_sent_to`."""

    class Comm:
        rank, size = 0, 3
        barrier = staticmethod(lambda: None)
        gather_objects = staticmethod(
            lambda own: [own, [[["lo", 7], ["lo", 100]]], [[["lo", 7], ["lo", 200]]]]  # rank 2 sends to somebody else
        )

    monkeypatch.setattr(traffic, "tcp_bytes", lambda: {(("lo", 100), ("lo", 7)): (5, 0)})
    assert bytes_sent_to(Comm) == [0, 5, 0]


def bad_batch_worker(comm):
    last = comm.size - 1
    model = sharded(device_mesh(comm.size))
    handle = tw.compress_shards(model, max_nonfinite=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, comm.rank, steps=1, optimizer=optimizer)
    before = fingerprint(model), [state["step"].item() for state in optimizer.state.values()]

    def bad_step():
        model(batch(comm.rank, 0)[0], poison=comm.rank == last).sum().backward()
        optimizer.step(), optimizer.zero_grad()

    bad_step()
    after = fingerprint(model), [state["step"].item() for state in optimizer.state.values()]
    skipped = handle.num_skipped
    train(model, comm.rank, steps=1, optimizer=optimizer)
    finite = all(p.to_local().isfinite().all() for p in model.parameters())
    moved = fingerprint(model) != before[0]
    bad_step(), bad_step()
    culprit = "gradient of the module ''" if last else "parameter"  # FSDP of one worker calls no collective
    with pytest.raises(FloatingPointError, match=f"3 steps in a row were not finite; first on rank {last}, {culprit}"):
        bad_step()
    assert (handle.ledger.bytes_sent > 0) == (last > 0)
    handle.detach()
    return before == after, skipped, finite, moved


@pytest.mark.filterwarnings("ignore:compress_shards. a step was not finite:RuntimeWarning")
@pytest.mark.parametrize("size", [1, 2])
def test_one_workers_bad_batch_is_skipped_on_all_shards(size):
    """The shard of one worker alone is infinite; no worker updates, and training goes on."""
    assert spawn(size, bad_batch_worker) == [(True, 1, True, True)] * size


def other_policies_worker(comm):
    model = sharded(device_mesh(2))
    for policy in ("raise", "apply"):
        with tw.compress_shards(model, on_nonfinite=policy) as handle:
            with pytest.raises(ValueError, match=f"Shards: parameter .* is attached to Shards.*{policy}.*detach"):
                tw.compress_shards(model)  # both would count steps and set FSDP's collectives
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(batch(comm.rank, 0)[0], poison=comm.rank == 1).sum().backward()
            if policy == "raise":
                with pytest.raises(FloatingPointError, match="Shards: a step was not finite; first on rank 1"):
                    optimizer.step()
            else:
                optimizer.step()
            assert handle.num_skipped == 0
            optimizer.zero_grad()
    return sum((~p.to_local().isfinite()).sum().item() for p in model.parameters())


def test_shards_apply_or_raise_where_told_so():
    assert sum(spawn(2, other_policies_worker)) > 0
