"""Models: published parameter counts, shapes, and what each promises of its outputs."""

from __future__ import annotations

import ast
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import thinwire.lab.train.models as models
from thinwire.lab.train.config import RunConfig
from thinwire.lab.train.models import (
    GPT,
    VGG16,
    AlexNet,
    CIFARResNet,
    DigitsNet,
    LSTMLanguageModel,
    ResNet,
    ResNet9,
    Transformer,
    apply,
    num_parameters,
)
from thinwire.lab.train.models.decoding import IncrementalDecoder
from thinwire.lab.train.models.transformer import BOS, EOS, PAD
from thinwire.lab.train.step.image_sizes import check_image_sizes
from thinwire.lab.train.step.training import built

PUBLISHED = [
    (CIFARResNet(20, "identity"), 10, 269_722),  # arXiv 1512.03385, Table 6: 0.27 M, 0.46 M, 0.85 M, 1.7 M
    (CIFARResNet(32, "identity"), 10, 464_154),
    (CIFARResNet(56, "identity"), 10, 853_018),
    (CIFARResNet(110, "identity"), 10, 1_727_962),
    (CIFARResNet(8), 10, 78_042),
    (CIFARResNet(20), 10, 272_474),
    (CIFARResNet(110), 10, 1_730_714),
    (ResNet(18), 1000, 11_689_512),
    (ResNet(34), 1000, 21_797_672),
    (ResNet(50), 1000, 25_557_032),
    (ResNet9(), 10, 6_573_120),
    (VGG16("cifar"), 10, 14_728_266),
    (VGG16("imagenet"), 1000, 138_365_992),
    (LSTMLanguageModel(), 28_869, 28_949_319),
    (GPT(layers=12, width=768, heads=12, context=1024), 50_257, 124_439_808),
]
IMAGE_MODELS = [CIFARResNet(8), CIFARResNet(8, "identity"), ResNet(18), ResNet(50), ResNet9(8), AlexNet(), VGG16()]
SMALL_GPT = GPT(layers=2, width=16, heads=2, context=8, dropout=0.0)
SMALL_TRANSFORMER = Transformer(layers=2, width=16, heads=2, hidden=32, dropout=0.0)


@pytest.mark.parametrize(("config", "num_classes", "published"), PUBLISHED, ids=repr)
def test_parameter_counts_are_the_published_ones(config, num_classes, published):
    with torch.device("meta"):
        assert num_parameters(config.build(num_classes)) == published


def test_the_alexnet_of_the_layer_wise_study_counts_as_its_layers_do():
    widths = (3, 64, 192, 384, 256, 256)
    kernels = sum(9 * a * b for a, b in zip(widths, widths[1:], strict=False))
    assert num_parameters(AlexNet().build()) == kernels + 2 * sum(widths[1:]) + 256 * 10


def test_the_base_transformer_has_about_the_published_65_million():
    with torch.device("meta"):
        assert num_parameters(Transformer().build(37_000)) == pytest.approx(65e6, rel=0.03)


@pytest.mark.parametrize("config", IMAGE_MODELS, ids=repr)
def test_image_models_map_images_to_scores_and_every_parameter_gets_a_gradient(config):
    torch.manual_seed(0)
    module = config.build(num_classes=7)
    scores = module(torch.randn(2, 3, 32, 32))
    scores.square().sum().backward()
    assert scores.shape == (2, 7) and scores.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("width", [10**6, 10**12, 10**18], ids=str)
@pytest.mark.parametrize("kind", [DigitsNet, ResNet9])
def test_a_model_too_large_for_the_memory_is_one_line_with_its_option(kind, width):
    line = f"a model of model.width {width} does not fit into memory; lower it"
    with pytest.raises(ValueError, match=line):
        built(RunConfig("digits", model=kind(width=width)), SimpleNamespace(num_classes=10))
    if width > 10**6:  # nothing is allocated there
        with pytest.raises(ValueError, match=line):
            check_image_sizes(kind(width=width), 10, [(3, 32, 32)], [], bf16_on_cpu=False)


def test_models_are_built_for_the_number_of_classes_that_the_data_has():
    assert DigitsNet(width=2).build(num_classes=3)(torch.zeros(1, 1, 8, 8)).shape == (1, 3)
    with torch.device("meta"):
        assert VGG16("imagenet").build(5)[-1].weight.shape == (5, 4096)


def test_depth_is_the_number_of_layers_with_weights_on_the_longest_path():
    for config in (*(CIFARResNet(d, "identity") for d in (8, 20, 32, 56, 110)), *map(ResNet, (18, 34, 50))):
        with torch.device("meta"):
            module = config.build()
        names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        assert len([name for name in names if "shortcut" not in name]) == config.depth


@pytest.mark.parametrize("depth", [18, 50])
def test_a_residual_network_with_zeroed_norms_starts_as_its_shortcuts(depth):
    module = ResNet(depth).build(10).eval()
    blocks = [m for m in module if hasattr(m, "residual")]
    x = torch.rand(2, 64, 8, 8)
    for block in blocks:
        shortcut = block.shortcut(x).relu()
        x = block(x)
        assert torch.equal(x, shortcut)
    plain = ResNet(depth, zero_init_residual=False).build(10)
    assert all((m.residual[-1].weight == 1).all() for m in plain if hasattr(m, "residual"))


def test_the_identity_shortcut_takes_every_other_pixel_and_pads_channels_with_zeros():
    x = torch.rand(2, 4, 6, 6)
    y = models.resnet.PaddedShortcut(4, 8, 2)(x)
    assert torch.equal(y[:, 2:6], x[:, :, ::2, ::2])
    assert not y[:, :2].any() and not y[:, 6:].any()


def test_language_model_shares_its_weights_and_carries_its_state():
    torch.manual_seed(0)
    module = LSTMLanguageModel(width=8, layers=2, dropout=0.5).build(11).eval()
    assert module.output.weight is module.embedding.weight
    tokens = torch.randint(11, (3, 10))
    whole, _ = apply(module, (tokens,))
    first, state = apply(module, (tokens[:, :4],))
    second, _ = apply(module, (tokens[:, 4:],), state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    alone, _ = apply(module, (tokens[:, 4:],))
    assert not torch.allclose(second, alone)


def test_gradients_do_not_reach_into_the_batch_before():
    module = LSTMLanguageModel(width=8, layers=1, dropout=0.0).build(5)
    _, state = module(torch.zeros(1, 2, dtype=torch.int64))
    state[0].retain_grad()
    module(torch.ones(1, 2, dtype=torch.int64), state)[0].sum().backward()
    assert state[0].grad is None


def test_gpt_sees_the_past_alone():
    torch.manual_seed(0)
    module = SMALL_GPT.build(11).eval()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = module(tokens), module(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5])
    assert not torch.allclose(after[:, 5:], before[:, 5:])
    assert module.output.weight is module.tokens.weight
    with pytest.raises(ValueError, match="9 tokens do not fit in a context of 8"):
        module(torch.zeros(1, 9, dtype=torch.int64))


def test_transformer_sees_the_past_of_the_target_and_ignores_padding():
    torch.manual_seed(0)
    module = SMALL_TRANSFORMER.build(13).eval()
    source, target = torch.randint(4, 13, (2, 6)), torch.randint(4, 13, (2, 5))
    scores = module(source, target)
    changed = target.clone()
    changed[:, 3] = 4 + (changed[:, 3] - 3) % 9
    torch.testing.assert_close(module(source, changed)[:, :3], scores[:, :3])
    padded = torch.cat([source, torch.full((2, 3), PAD)], dim=1)
    torch.testing.assert_close(module(padded, target), scores)


def test_translation_takes_the_likeliest_token_and_stops_at_the_end():
    torch.manual_seed(1)
    module = SMALL_TRANSFORMER.build(13).eval()
    source = torch.randint(4, 13, (3, 6))
    source[1, 4:] = PAD
    with torch.no_grad():
        module.output.bias[[PAD, EOS]] = -100.0
        taken = module.translate(source, num_extra=-1)
        scores = module(source, torch.cat([torch.full((3, 1), BOS), taken[:, :-1]], dim=1))
        assert (taken != PAD).sum(dim=1).tolist() == [5, 3, 5], "one fewer than each source has"
        assert torch.equal(scores.argmax(dim=-1)[taken != PAD], taken[taken != PAD])
        module.output.bias[EOS] = 100.0
        assert module.translate(source).tolist() == [[EOS]] * 3


def test_decoding_token_by_token_gives_what_the_whole_decoder_gives():
    torch.manual_seed(0)
    module = SMALL_TRANSFORMER.build(13).double().eval()
    source, target = torch.randint(4, 13, (3, 6)), torch.randint(4, 13, (3, 5))
    source[0, 3:] = PAD
    with torch.no_grad():
        decoder = IncrementalDecoder(module.transformer.decoder, module.encode(source), source == PAD)
        steps = [module.output(decoder.step(module._embed(target[:, i : i + 1], i))) for i in range(5)]
        torch.testing.assert_close(torch.cat(steps, dim=1), module(source, target))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CIFARResNet(19), "model.depth must be one of"),
        (lambda: CIFARResNet(20, "none"), "model.shortcut must be one of"),
        (lambda: ResNet(101), r"model.depth must be one of 18, 34, 50, got 101"),
        (lambda: VGG16("huge"), "model.size must be one of"),
        (lambda: ResNet9(0), "model.width must be an integer, 1 or more"),
        (lambda: LSTMLanguageModel(layers=0), "model.layers must be an integer, 1 or more"),
        (lambda: LSTMLanguageModel(dropout=1.0), "model.dropout must be at least 0 and below 1"),
        (lambda: GPT(width=10, heads=3), "model.heads must divide model.width 10, got 3"),
        (lambda: Transformer(width=9, heads=3), "model.width must be even"),
        (lambda: Transformer(heads=7), "model.heads must divide"),
    ],
)
def test_unknown_values_are_one_line_errors(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_configurations_are_frozen_and_their_repr_rebuilds_them():
    for name in models.__all__:
        config = getattr(models, name)
        if dataclasses.is_dataclass(config):
            ast.parse(repr(config()))
            assert eval(repr(config()), vars(models)) == config()
            assert issubclass(config, models.Model)
            with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
                config().depth = 3
