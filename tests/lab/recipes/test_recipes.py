"""Every recipe: its name, small version, strategy, description and image sizes; a few of them take real steps."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny

from thinwire import Local, LocalWorld, attach, parse
from thinwire.lab.recipes import SMALL, Task, TaskMethod, recipes, tasks
from thinwire.lab.report import read_run
from thinwire.lab.train import RunConfig, train
from thinwire.lab.train.data import CIFAR10, Digits, ImageFolder
from thinwire.lab.train.models import Model, ResNet
from thinwire.lab.train.optimize import DGCSGD
from thinwire.lab.train.step.image_sizes import check_image_sizes
from thinwire.strategy import Averaging

ALL = recipes()


def test_no_two_tasks_have_a_recipe_of_one_name():
    assert len(ALL) == sum(len(task.recipes()) for task in tasks())


def test_every_recipe_is_a_configuration_that_knows_its_name():
    for name, recipe in ALL.items():
        assert recipe.config.recipe == name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert recipe.about and "\n" not in recipe.about, name
        assert isinstance(recipe.config.parsed_strategy(), Averaging), name
        json.dumps(recipe.config.as_dict())


@pytest.mark.parametrize("task", tasks(), ids=lambda task: f"{task.full.recipe} {task.title}")
def test_every_task_names_its_paper_and_its_small_version_is_the_same_task(task):
    if task.small is None:
        return
    assert task.full.recipe == task.small.recipe
    assert re.search(r"\d{4}\.\d{5}", task.title), "title without an arXiv number"
    assert type(task.full.data) is type(task.small.data)
    assert type(task.full.model) is type(task.small.model)
    for end in task.methods:
        full, small = (ALL[task.name(end) + size].config.parsed_strategy() for size in ("", SMALL))
        assert (type(full), type(full.averager)) == (type(small), type(small.averager))


def test_where_the_averager_applies_momentum_the_optimizer_does_not():
    strategy = "Gradients(Mean(TopK(0.01), MomentumCorrection(0.9, nesterov=True)))"
    full = RunConfig("task")
    config = Task("a task", full, {"dgc": TaskMethod("sparse", strategy)}).recipes()["task-dgc"].config
    assert isinstance(config.optimizer, DGCSGD) and config.optimizer.nesterov
    assert config.optimizer.schedule == full.optimizer.schedule
    other = replace(full, optimizer=replace(full.optimizer, momentum=0.8))
    made = Task("a task", other, {"dgc": TaskMethod("sparse", strategy)}).recipes()  # no configuration as yet
    with pytest.raises(ValueError, match="must have the momentum of"):
        assert made["task-dgc"].config


@pytest.mark.parametrize("strategy", ["Gradients(Dion(rank=2))", "Gradients(ByName({'*': dgc(0.1)}))"])
def test_an_averager_whose_momentum_has_no_factor_takes_the_optimizers_place(strategy):
    full = RunConfig("task")
    config = Task("a task", full, {"own": TaskMethod("an own method", strategy)}).recipes()["task-own"].config
    assert config.optimizer == replace(full.optimizer, momentum=0.0)


def test_there_is_a_recipe_for_every_experiment():
    expected = """
        cifar10-resnet9-topk cifar10-alexnet-qsgd cifar10-vgg16-terngrad-model imagenet-resnet50-randomk
        cifar10-resnet20-dgc cifar10-resnet110-dgc imagenet-resnet18-dgc imagenet-resnet50-dgc imagenet-vgg16-dgc
        imagenet-resnet50-sgp imagenet-resnet50-osgp imagenet-resnet50-adpsgd
        cifar10-resnet32-alq cifar10-resnet32-amq cifar10-resnet110-alq imagenet-resnet18-alq
        text-gpt-ddp text-gpt-diloco text-gpt-streaming-diloco text-gpt-sparseloco text-gpt-demo text-gpt-dion text-gpt-noloco
        text-gpt-muloco text-gpt-asynchronous-diloco wikitext2-gpt-sparseloco
        cifar10-resnet20-powergossip cifar10-resnet20-choco cifar10-resnet20-powergossip-by-class
    """.split()
    for name in expected:
        assert {name, name + SMALL} <= ALL.keys()
    for model in {name.rsplit("-", 1)[0] for name in expected if name.count("-") == 2}:
        assert f"{model}-dense" in ALL


def test_demo_adds_up_rate_times_gradient():
    for name in ("text-gpt-demo", "text-gpt-demo" + SMALL):
        assert ALL[name].config.optimizer.rate_in_loss and ALL[name].config.strategy == "demo()"


STEPPING = {(recipe.config.strategy, recipe.config.workers) for recipe in ALL.values()}


@pytest.mark.parametrize(("text", "size"), sorted(STEPPING), ids=str)
def test_every_strategy_takes_a_step_on_as_many_workers_as_its_recipe_has(text, size):
    strategy = parse(text)
    if isinstance(strategy, Local):  # the model has one layer
        strategy = replace(strategy, every=1, delay=0, fragments=1)

    def worker(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = attach(model, optimizer, strategy, comm=comm)
        before = model.weight.clone()
        model(torch.full((4, 20), 1.0 + comm.rank)).square().mean().backward()
        optimizer.step()
        handle.detach()
        return (model.weight != before).any().item() and model.weight.isfinite().all().item()

    assert all(LocalWorld(size).run(worker))


@pytest.mark.parametrize("end", ["resnet18-dgc", "resnet50-dgc", "vgg16-dense", "resnet50-sgp-dense", "resnet50-sgp"])
def test_learning_rates_of_imagenet_are_a_tenth_for_256_images_and_drop_three_times(end):
    config = ALL[f"imagenet-{end}"].config
    rates = [config.optimizer.learning_rate_at(epoch, 90, config.workers) for epoch in range(90)]
    highest = 0.1 * config.workers * config.batch_size / 256
    assert rates[0] < rates[3] < rates[4] == pytest.approx(highest)
    assert [rates[epoch] / highest for epoch in (29, 30, 60, 80)] == pytest.approx([1, 0.1, 0.01, 0.001])


def test_the_layerwise_study_counts_an_image_for_as_much_as_its_original_in_every_phase():
    config = ALL["imagenet-resnet50-dense"].config
    assert [config.data.size_at(epoch) for epoch in (0, 13, 14, 31, 32, 34)] == [128, 128, 224, 224, 288, 288]
    # (epoch, learning rate, batch) of the original for 8 GPUs
    for epoch, rate, batch in (
        (6, 1, 512),
        (15, 224 / 512, 224),
        (17, 22.4 / 512, 224),
        (30, 2.24 / 512, 224),
        (34, 0.128 / 512, 128),
    ):
        here = config.optimizer.learning_rate_at(epoch, 35, config.workers) / config.batch_size
        assert here == pytest.approx(rate / batch)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder with five images in each of ten classes, and two for the test."""
    return tiny.images(tmp_path_factory.mktemp("images"), 5, 2).folder


def image_sides(config: RunConfig) -> list[int]:
    """Sides of the images of a run, in pixels, those of the test last; empty for data without images."""
    match config.data:
        case ImageFolder(sizes=sizes, test_size=test_size):
            return [*(side for _, side in sizes), test_size]
        case CIFAR10():
            return [32]
        case Digits():
            return [8]
    return []


def layers_of(model: Model) -> Model:
    """A model of the same layers: recipes differ in the weights that a ResNet begins with."""
    return replace(model, zero_init_residual=False, head_std=None) if isinstance(model, ResNet) else model


# The configurations of all image models, each once, with all of its image sizes.
IMAGE_TASKS = {
    (layers_of(recipe.config.model), tuple(image_sides(recipe.config)), name.endswith(SMALL)): name
    for name, recipe in ALL.items()
    if image_sides(recipe.config)
}


@pytest.mark.parametrize(
    ("task", "name"), IMAGE_TASKS.items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_no_layer_of_a_recipe_shrinks_below_what_its_kernel_sees(task, name):
    model, sides, _ = task
    channels = 1 if isinstance(ALL[name].config.data, Digits) else 3
    shapes = [(channels, side, side) for side in sides]
    assert check_image_sizes(model, 10, shapes, shapes, bf16_on_cpu=True) == []


SMALL_MODELS = {(repr(model), min(sides)): (model, min(sides)) for model, sides, is_small in IMAGE_TASKS if is_small}


def dirty_allocator(model: torch.nn.Module) -> None:
    """Free blocks full of 7e18, so that memory which is used without being written shows."""
    sizes = [k * 300_000 for k in (1, 2, 3, 4, 8)] + [p.numel() for p in model.parameters() if p.ndim > 1]
    junk = [torch.full((size,), 7e18) for size in sizes] + [torch.full((size,), 7e18).bfloat16() for size in sizes]
    del junk


def bf16_gradients(model, side: int, is_dirty: bool) -> list[torch.Tensor]:
    """Gradients and weights after a step of SGD, in bf16 as the training loop computes."""
    torch.manual_seed(0)
    network = model.build(10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(2, 3, side, side).contiguous(memory_format=torch.channels_last)
    if is_dirty:
        dirty_allocator(network)
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(network(images), torch.arange(2))
    optimizer.zero_grad()
    if is_dirty:
        dirty_allocator(network)
    loss.backward()
    optimizer.step()
    return [tensor for p in network.parameters() for tensor in (p.grad, p.detach())]


@pytest.mark.parametrize(
    ("model", "side"), SMALL_MODELS.values(), ids=[repr(model) for model, _ in SMALL_MODELS.values()]
)
def test_small_versions_have_the_same_bf16_gradients_whatever_freed_memory_holds(model, side):
    clean, dirty = (bf16_gradients(model, side, is_dirty) for is_dirty in (False, True))
    for a, b in zip(clean, dirty, strict=True):
        assert a.isfinite().all() and a.abs().max() < 1e4
        assert a.equal(b)


@pytest.mark.parametrize(
    "name",
    ["cifar10-resnet20-dgc-small", "cifar10-resnet20-powergossip-by-class-small", "imagenet-resnet50-osgp-small"],
)
def test_small_versions_take_real_steps(name, images, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = ALL[name].config
    data = replace(config.data, folder=images)
    if isinstance(data, ImageFolder):
        data = replace(data, test="test", num_loaders=0)
    folder = train(replace(config, data=data, workers=2, batch_size=8, max_steps=2, log_every=1, output=tmp_path))
    run = read_run(folder)
    assert run.summary["recipe"] == name and run.summary["bytes_sent_per_worker"] > 0
    assert [row["step"] for row in run.rows] == [1, 2]
    assert all(row["loss"] > 0 for row in run.rows)


OWN = RunConfig("own")
METHODS = {"": TaskMethod("dense")}


@pytest.mark.parametrize(
    ("added", "text"),
    [
        (Task("Own", OWN, METHODS), "they must be a tuple of `Task`, got Task("),
        ((OWN,), "they must be a tuple of `Task`, got (RunConfig("),
        ((Task("Own", RunConfig("digits"), METHODS),), "there is a recipe 'digits' already; choose another name"),
        (
            (Task("Own", OWN, METHODS), Task("Own", OWN, METHODS)),
            "there is a recipe 'own' already; choose another name",
        ),
        (
            (Task("Own", OWN, {"": TaskMethod("dense", "Gradients(Meen())")}),),
            "unknown name 'Meen'; did you mean 'Mean'?",
        ),
    ],
)
def test_a_wrong_package_leaves_the_recipes_of_all_others(added, text, monkeypatch, caplog):
    right = SimpleNamespace(value="right:TASKS", dist=None, load=lambda: [Task("Right", RunConfig("right"), METHODS)])
    wrong = SimpleNamespace(value="wrong:TASKS", dist=SimpleNamespace(name="wrong"), load=lambda: added)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [wrong, right])
    recipes.cache_clear()
    monkeypatch.setattr(logging.getLogger("thinwire"), "propagate", True)
    try:
        assert set(recipes()) == {*ALL, "right"}
    finally:
        recipes.cache_clear()
    assert f"the recipes wrong:TASKS of the package wrong are left out: {text}" in caplog.text


def test_a_package_that_raises_is_left_out_with_class_and_line(monkeypatch, caplog):
    wrong = SimpleNamespace(value="wrong:TASKS", dist=SimpleNamespace(name="wrong"), load=lambda: {}["x"])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [wrong])
    recipes.cache_clear()
    monkeypatch.setattr(logging.getLogger("thinwire"), "propagate", True)
    try:
        recipes()
    finally:
        recipes.cache_clear()
    assert re.search(r"are left out: KeyError: 'x', in \S*test_recipes.py:\d+; mend or uninstall it", caplog.text)
