"""Options of the papers' own programs, and how they are written here."""

from __future__ import annotations

NONE = "no option is needed"

TRAIN = {
    # Deep Gradient Compression, train.py; without "configs." and "train."
    "configs": "--config FILE, once for each file",
    "devices": "--device",
    "dataset.root": "--data.folder",
    "num_batches_per_step": "--accumulate",
    "optimizer.lr": "--optimizer.learning-rate",
    "warmup_lr_epochs": "--optimizer.schedule.warmup-fraction",
    "optimize_bn_separately": "--optimizer.undecayed norms",
    "compression.compress_ratio": "--strategy.averager.ratio",
    "compression.sample_ratio": "--strategy.averager.sample",
    "compression.warmup_epochs": "--strategy.averager.warmup-epochs",
    "compression.warmup_coeff": '--strategy.averager.ratio "Values((0.25, 0.063, 0.015, 0.004, 0.001))"',
    "compression.fp16_values": "--strategy.averager.values float16",
    "compression.int32_indices": f"{NONE}: an index takes as few bits as it needs",
    "compression.memory.momentum_masking": "--strategy.averager.masking",
    "compression.memory.nesterov": "--strategy.averager.nesterov",
    # What others call parts of a strategy, and what the recipe chooses
    "averager": '--strategy "Gradients(Mean(QSGD(bits=4)))", or --strategy.averager for another one in the recipe\'s',
    "codec": '--strategy "Gradients(Mean(QSGD(bits=4)))", or --strategy.averager.codec for another one in the recipe\'s',
    "model": "the recipe, such as cifar10-resnet20-dgc; thinwire train --list shows them",
    # The layer-wise study, train_imagenet_nv.py
    "compress": "--strategy.averager.granularity layer (or model)",
    "method": '--strategy.averager.codec "TopK(0.1)"',
    "ratio": "--strategy.averager.codec.ratio",
    "K": "--strategy.averager.codec.ratio",
    "threshold": "--strategy.averager.codec.value",
    "V": "--strategy.averager.codec.value",
    "qstates": "--strategy.averager.codec.levels",
    "Q": "--strategy.averager.codec.levels",
    "logdir": "--output",
    "phases": "--data.sizes",
    "no_bn_wd": "--optimizer.undecayed norms",
    "init_bn0": "--model.zero-init-residual",
    "distributed": f"{NONE}: --workers, or a launcher",
    # Stochastic Gradient Push, gossip_sgd.py
    "lr": "--optimizer.learning-rate",
    "num_epochs": "--epochs",
    "momentum": "--optimizer.momentum",
    "weight_decay": "--optimizer.weight-decay",
    "nesterov": "--optimizer.nesterov",
    "schedule": "--optimizer.schedule.drops",
    "warmup": "--optimizer.schedule.warmup-fraction",
    "all_reduce": '--strategy "Gradients(Mean())"',
    "push_sum": '--strategy.averager "PushSum()", or "Mix()" without',
    "graph_type": '--strategy.averager.topology "Exponential(alternating=True)" (0), "BipartiteExponential()" (1), '
    '"Linear()" (2), "BipartiteLinear()" (3), "Ring()" (4), "Exponential()" (5)',
    "mixing_strategy": f"{NONE}: weights are uniform",
    "peers_per_itr_schedule": '--strategy.averager.topology "Exponential(peers=2)", or Phases(...) by epoch',
    "overlap": "--strategy.overlap true",
    "synch_freq": "--strategy.staleness",
    "print_freq": "--log-every",
    "tag": "--name",
    "checkpoint_dir": "--output",
    "dataset_dir": "--data.folder",
    "num_dataloader_workers": "--data.num-loaders",
    "num_iterations_per_training_epoch": "--max-steps",
    "train_fast": "--evaluate-every",
    "network_interface_type": "--interface",
    "master_port": "--port",
    "fp16": "--precision fp16",
    "amp": "--precision fp16",
    "True": "an option such as --resume has no value, and --no-resume is its opposite",
    "False": "an option such as --resume has no value, and --no-resume is its opposite",
    # ALQ and NUQSGD, main.gvar
    "dataset": "the recipe, such as cifar10-resnet32-alq",
    "arch": "the recipe, such as cifar10-resnet32-alq",
    "niters": "--max-steps",
    "lr_decay_epoch": "--optimizer.schedule.drops",
    "g_estim": '--strategy "Gradients(Mean())" for sgd, a recipe for nuq',
    "nuq_method": "the recipe, such as cifar10-resnet32-alq",
    "nuq_bits": "--strategy.averager.codec.codec.bits",
    "nuq_bucket_size": "--strategy.averager.codec.codec.bucket-size",
    "nuq_ngpu": "--workers",
    "nuq_layer": "--strategy.averager.granularity",
    "dist_num": "--strategy.averager.codec.codec.num-buckets",
    "g_osnap_iter": "--strategy.averager.codec.codec.update-steps",
    "g_bsnap_iter": "--strategy.averager.codec.codec.update-every",
    "gvar_log_iter": "--variance --log-every",
    "logger_name": "--name",
    # PowerGossip, train.config
    "n_workers": "--workers",
    "learning_rate": "--optimizer.learning-rate",
    "topology": "--strategy.averager.topology",
    "optimizer_rank": "--strategy.averager.rank",
    "optimizer_num_iterations": "--strategy.averager.iterations",
    "optimizer_warm_start": "--strategy.averager.warm-start",
    "optimizer_diffusion_rate": "--strategy.averager.step-size",
    "optimizer_theta": "--strategy.averager.theta",
    "optimizer_compressor": "--strategy.averager.codec",
    "optimizer_keep_ratio": "--strategy.averager.codec.ratio",
    "use_decentralized_data": "--split by-class",
    "distributed_backend": "--transport",
    "distributed_lr_warmup_epoch": "--optimizer.schedule.warmup-fraction",
    "lr_schedule_milestones": "--optimizer.schedule.drops",
}

SWEEP = {
    # ALQ and NUQSGD, grid_run.py
    "grid": "the sweep's file, such as examples/sweeps/quantizers.toml",
    "run_name": "the sweep's file, such as examples/sweeps/quantizers.toml",
    "prefix": 'output = "runs/NAME" in the file',
    "cluster": "--slurm partition=NAME,time=24:00:00",
    "cluster_args": "--slurm partition=NAME,array-parallelism=N,time=24:00:00 --pack N",
}


def written_here(option: str, originals: dict[str, str]) -> str:
    """The end of an error message about an unknown option: how it is written here; empty if it is no original's.

    Example:
        >>> written_here("--configs.train.num_epochs", TRAIN)
        '; here: --epochs'
    """
    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    name = name.removeprefix("configs.").removeprefix("train.")
    return f"; here: {originals[name]}" if name in originals else ""
