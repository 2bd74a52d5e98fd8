"""Every inside of TorchRec and PyTorch that the package leans on, by the class that has it.

The tables say what is used, whoever uses it; the package is walked for uses, so its files may move.
A use that is not in the tables fails here, and so does a name that the installed release no longer
has, or a method whose parameters changed: with our file and line, since that is where the next
release breaks us. What is used no more may leave the tables.
"""

import ast
import importlib
import inspect
import sys
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from tests.support import upstream
from torchrec_picasso import _torchrec

IS_1_8 = version("torchrec").startswith("1.8.")

INHERITED: dict[str, set[str]] = {
    "BaseEmbeddingSharder": {"fused_params", "qcomm_codecs_registry"},
    "BaseRwEmbeddingSharding": {
        *("_device", "_pg", "_rank", "_shard", "_world_size"),
        *("_grouped_embedding_configs", "_grouped_embedding_configs_per_rank"),
    },
    "EmbeddingBagCollectionSharder": {
        *("_sharded_module_order_overwrite", "fused_params", "qcomm_codecs_registry")
    },
    "EmbeddingCollectionSharder": {*("_use_index_dedup", "fused_params", "qcomm_codecs_registry")},
    "EmbeddingEnumerator": {
        *("_batch_size", "_compute_device", "_constraints", "sharder_map"),
        *("_last_stored_module", "_last_stored_search_space"),
        *("_estimators", "_sharder_data_map"),
    },
    "EmbeddingShardingPlanner": {"_enumerator", "_storage_reservation", "_topology"},
    "FeatureProcessedEmbeddingBagCollectionSharder": {"_ebc_sharder"},
    "GroupedEmbeddingsLookup": {"_emb_modules"},
    "GroupedPooledEmbeddingsLookup": {"_emb_modules"},
    "KeyedJaggedTensor": {"to_dict"},
    "PipelinedForward": {"_module", "_name"},
    "ShardedEmbeddingBagCollection": {
        *("_embedding_shardings", "module_sharding_plan"),
        *("_create_input_dist", "_features_order", "_has_features_permute"),
        "_create_inverse_indices_permute_indices",
        *("_has_uninitialized_input_dist", "compute_and_output_dist", "create_context"),
        "get_buffer",
        *("_has_mean_pooling_callback", "_pooling_type_to_rs_features"),
        *("_embedding_dims", "_embedding_names", "_lookups", "_sharding_types"),
        "sharding_type_to_sharding_infos",
    },
    "ShardedEmbeddingCollection": {
        *("_embedding_names_per_sharding", "_features_order", "_lookups", "_need_indices"),
        *("_output_dists", "_sharding_type_to_sharding", "_use_index_dedup", "get_buffer"),
        *("_device", "_feature_splits", "_sharding_types"),
        *("post_lookup_tracker_fn", "post_odist_tracker_fn"),
    },
    "ShardedEmbeddingModule": {"_lookups", "create_context", "get_buffer"},
    "ShardedFeatureProcessedEmbeddingBagCollection": {"_embedding_bag_collection", "is_pipelined"},
    "TensorBase": {"detach"},
    "TrainPipelineSparseDist": {
        *("_batch_count", "_create_context", "_device", "_model", "_model_attached", "_optimizer"),
        "_dataloader_exhausted",
        *("_model_fwd", "_execute_all_batches", "contexts", "progress"),
        *("_data_dist_stream", "_memcpy_stream", "copy_batch_to_gpu", "wait_sparse_data_dist"),
        *("_pipeline_postproc", "inplace_copy_batch_to_gpu"),
        *("_backward", "_optimizer_step"),
    },
}
"""What our subclasses use of a class of theirs, on themselves."""

FOREIGN: dict[str, set[str]] = {
    "torchrec.distributed.model_parallel.DistributedModelParallel": {
        *("_data_parallel_wrapper", "_dmp_wrapped_module", "_env")
    },
    "torchrec.distributed.embedding.ShardedEmbeddingCollection": {"_create_output_dist"},
    "torchrec.modules.fp_embedding_modules.FeatureProcessedEmbeddingBagCollection": {
        *("_embedding_bag_collection", "_feature_processors")
    },
    "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection": {
        *("_create_output_dist", "_has_uninitialized_input_dist")
    },
    "torchrec.distributed.embedding_lookup.GroupedPooledEmbeddingsLookup": {"_emb_modules"},
    "torchrec.distributed.model_tracker.model_delta_tracker.ModelDeltaTrackerTrec": {"_mode"},
    "torchrec.distributed.dist_data.KJTAllToAllTensorsAwaitable": {"_stride_per_rank"},
    "torchrec.distributed.sharding.tw_sharding.TwSparseFeaturesDist": {"_dist"},
    "torchrec.modules.regroup.KTRegroupAsDict": {"_groups", "_keys"},
    "torch": {
        "_C",
        "_foreach_add",
        "_foreach_add_",
        "_foreach_copy_",
        "_foreach_div_",
        "_foreach_sub",
    },
    "torch._C": {"_autograd", "_current_graph_task_id", "_disabled_torch_function_impl"},
    "torch._C._autograd": {"_top_saved_tensors_default_hooks"},
    "torch.nn.utils.parametrize": {"_cache_enabled"},
    "torch._C._distributed_c10d.Backend.Options": {"_timeout"},
    "torch._dynamo.compiled_autograd": {"in_compiled_autograd_region"},
    "torch.Tensor": {
        *("_backward_hooks", "_base", "_is_view", "_post_accumulate_grad_hooks", "_version")
    },
    "torch.UntypedStorage": {"_cdata"},
    "torch._ops.OpOverload": {"_schema"},
    "torch.ops.aten": {"_embedding_bag_per_sample_weights_backward"},
    "torch.autograd.Variable": {"_execution_engine"},
    "torch.autograd.profiler": {"_is_profiler_enabled"},
    "torch.distributed.ProcessGroup": {"_get_backend"},
    "torch.distributed.distributed_c10d": {
        *("_get_default_store", "_new_process_group_helper", "_world")
    },
    "torch.nn.Module": {
        *("_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"),
        *("_buffers", "_non_persistent_buffers_set"),
    },
    "torch.nn.modules.batchnorm": {"_BatchNorm"},
    "torch.nn.parallel.DistributedDataParallel": {
        *("_comm_hooks", "_delay_all_reduce_params", "_module_parameters"),
        "_static_graph_delay_allreduce_enqueued",
    },
}
"""What code of ours uses of an object of theirs."""

STAMPS: dict[str, set[str]] = {
    "torch.distributed.optim.apply_optimizer_in_backward": {
        *("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")
    }
}
"""What a module of theirs puts on parameters, and we read or put there in its place."""

OF_PYTHON = {
    *("_SubParsersAction", "_exit", "_fields", "_getframe", "_lru_cache_wrapper", "_make"),
    "_slotnames",
}

SIGNATURES: dict[str, str] = {
    "BaseEmbedding.__init__": "",
    "BaseRwEmbeddingSharding.__init__": (
        "sharding_infos, env, device, need_pos, qcomm_codecs_registry, "
        "device_type_from_sharding_infos"
    ),
    "CacheParams.__init__": (
        "algorithm, load_factor, reserved_memory, precision, prefetch_pipeline, stats, "
        "multipass_prefetch_config"
    ),
    "EmbeddingEnumerator.__init__": (
        "topology, batch_size, constraints, estimator, use_exact_enumerate_order"
    ),
    "EmbeddingFusedOptimizer.__init__": (
        "config, emb_module, pg, create_for_table, param_weight_for_table, "
        "embedding_weights_by_table, all_optimizer_states"
    ),
    "GroupedEmbeddingsLookup.__init__": "grouped_configs, pg, device, env",
    "GroupedEmbeddingsLookup._create_embedding_kernel": "config, pg, device, env",
    "GroupedPooledEmbeddingsLookup.__init__": (
        "grouped_configs, device, pg, feature_processor, scale_weight_gradients, sharding_type, env"
    ),
    "GroupedPooledEmbeddingsLookup._create_embedding_kernel": (
        "config, device, pg, sharding_type, env"
    ),
    "KeyedJaggedTensor.to_dict": "compute_offsets",
    "LazyAwaitable.__init__": "",
    "Pipelineable.to": "device, non_blocking",
    "PipelinedForward.__call__": "*input, **kwargs",
    "ShardedEmbeddingBagCollection.__init__": (
        "module, table_name_to_parameter_sharding, env, fused_params, device, "
        "qcomm_codecs_registry, module_fqn, sharded_module_order_overwrite"
    ),
    "ShardedEmbeddingBagCollection.create_grouped_sharding_infos": (
        "module, table_name_to_parameter_sharding, prefix, fused_params, suffix"
    ),
    "ShardedEmbeddingBagCollection._create_inverse_indices_permute_indices": "inverse_indices",
    "ShardedEmbeddingBagCollection.update_shards": "changed_sharding_params, env, device",
    "ShardedEmbeddingCollection.__init__": (
        "module, table_name_to_parameter_sharding, env, fused_params, device, "
        "qcomm_codecs_registry, use_index_dedup, module_fqn"
    ),
    "ShardedModule.forward": "*input, **kwargs",
    "ShardedModule.input_dist": "ctx, *input, **kwargs",
    "ShardedEmbeddingCollection.create_grouped_sharding_infos": (
        "module, table_name_to_parameter_sharding, fused_params"
    ),
    "TrainPipelineSparseDist.__init__": (
        "model, optimizer, device, execute_all_batches, apply_jit, context_type, "
        "pipeline_postproc, custom_model_fwd, dmp_collection_sync_interval_batches, "
        "enqueue_batch_after_forward, enable_inplace_copy_batch, free_features_storage_early, "
        "clear_data_dist_inputs" + ("" if IS_1_8 else ", async_inplace_copy")
    ),
    "TrainPipelineSparseDist._backward": "losses",
    "TrainPipelineSparseDist.copy_batch_to_gpu": "dataloader_iter",
    "TrainPipelineSparseDist.inplace_copy_batch_to_gpu": "dataloader_iter",
    "TrainPipelineSparseDist.wait_sparse_data_dist": "context",
}
"""Parameters of TorchRec's methods that we replace by others, call from a replacement, or call at
all; those that are not here have the replacement's, or none."""

FUNCTIONS: dict[str, str] = {
    "append_prefix": "prefix, name",
    "use_context_for_postprocs": "pipelined_postprocs, next_batch_context",
    "data_type_to_sparse_type": "data_type",
    "detach_model": (
        "model, pipelined_modules, original_forwards, original_kjt_dist_forwards, "
        "pipelined_postprocs"
    ),
    "get_gradient_division": "",
    "get_leaf_module_names": "model",
    "get_state_dict": "embedding_tables, params, pg, destination, prefix",
    "optimizer_multiplier": "optimizer_class, shape",
    "override_input_dist_forwards": "pipelined_modules",
    "rewrite_model": (
        "model, context, dist_stream, batch, apply_jit, pipelined_forward, pipeline_postproc, "
        "default_stream"
    ),
    "start_data_dist": "pipelined_modules, batch, context",
    "wait_for_batch": "batch, stream, record_stream",
}
"""Parameters of the functions behind the one door to TorchRec, by the names they have there."""

FEWEST_MODULES, FEWEST_CLASSES = 100, 15
FEWEST_INHERITED, FEWEST_FOREIGN, FEWEST_OVERRIDES = 50, 20, 25
"""The walk must see at least these; a walk that sees nothing finds nothing."""


def _names_of(table: dict[str, set[str]]) -> frozenset[str]:
    return frozenset(name for names in table.values() for name in names)


def _in_the_package(uses: list[upstream.Use], name: str) -> str:
    """Where a name is used, for a failure's message."""
    places = sorted({use.place for use in uses if use.name == name})
    return ", ".join(places) or "nowhere in the package any more"


def test_the_walk_sees_the_package() -> None:
    assert len(upstream.our_modules()) >= FEWEST_MODULES
    assert len(upstream.our_classes()) >= FEWEST_CLASSES
    assert len(upstream.inherited_uses()) >= FEWEST_INHERITED
    assert len(upstream.foreign_uses(_names_of(FOREIGN))) >= FEWEST_FOREIGN
    assert len(upstream.overrides()) >= FEWEST_OVERRIDES


def test_what_is_inherited_is_in_the_table() -> None:
    missing = [
        use for use in upstream.inherited_uses() if use.name not in INHERITED.get(use.owner, ())
    ]
    assert not missing, "not in INHERITED (no owner: nobody defines it):\n" + _lines(missing)


def test_what_is_used_of_others_is_in_the_table() -> None:
    known = _names_of(FOREIGN) | _names_of(STAMPS)
    missing = [use for use in upstream.foreign_uses(known) if use.name not in known | OF_PYTHON]
    assert not missing, "not in FOREIGN or STAMPS:\n" + _lines(missing)


def _lines(uses: list[upstream.Use]) -> str:
    return "\n".join(map(str, sorted(uses)))


def _class_named(name: str) -> type:
    for ours in upstream.our_classes():
        for base in ours.__mro__:
            if base.__name__ == name and not base.__module__.startswith("torchrec_picasso"):
                return base
    raise AssertionError(f"no class of the package inherits from {name}; take it out of the table")


@pytest.mark.parametrize("owner", list(INHERITED))
def test_their_classes_still_have_what_is_inherited(owner: str) -> None:
    cls = _class_named(owner)
    defined = {name for base in cls.__mro__[:-1] for name in upstream.defined_names(base)}
    for name in sorted(INHERITED[owner]):
        places = _in_the_package(upstream.inherited_uses(), name)
        assert name in defined, f"{cls.__module__}.{owner} has no {name} any more; used in {places}"


def _imported(path: str) -> Any:
    """The module, or the object in a module or class, of a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(_imported(module), name)


@pytest.mark.parametrize("owner", list(FOREIGN))
def test_their_objects_still_have_what_is_used(owner: str) -> None:
    found = _imported(owner)
    defined = set(dir(found))
    if inspect.isclass(found):
        defined |= {name for base in found.__mro__[:-1] for name in upstream.defined_names(base)}
    if owner.endswith("OpOverload"):
        defined |= set(vars(_an_operator()))
    for name in sorted(FOREIGN[owner]):
        places = _in_the_package(upstream.foreign_uses(frozenset({name})), name)
        is_there = name in defined or hasattr(found, name)  # operators are found when asked for
        assert is_there, f"{owner} has no {name} any more; used in {places}"


def _an_operator() -> Any:
    return torch.ops.aten.add.Tensor


@pytest.mark.parametrize("module", list(STAMPS))
def test_parameters_still_carry_what_is_read(module: str) -> None:
    source = Path(str(inspect.getsourcefile(_module(module)))).read_text()
    written = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    for name in sorted(STAMPS[module]):
        places = _in_the_package(upstream.foreign_uses(frozenset({name})), name)
        assert name in written, f"{module} puts no {name} on parameters any more; used in {places}"


def _module(path: str) -> Any:
    """A module, even where its package gives a function the same name."""
    importlib.import_module(path)
    return sys.modules[path]


def test_overridden_methods_have_their_parameters() -> None:
    wrong = []
    for use, theirs, ours in upstream.overrides():
        own = upstream.parameters_of(ours) if ours is not None else ""
        expected = SIGNATURES.get(f"{use.owner}.{use.name}", own)
        if (found := upstream.parameters_of(theirs)) != expected:
            wrong.append(f"{use}: expected ({expected}), TorchRec has ({found})")
    assert not wrong, "\n".join(wrong)


def test_functions_behind_the_door_have_their_parameters() -> None:
    functions = {
        name: upstream.parameters_of(function)
        for name, function in vars(_torchrec).items()
        if isinstance(function, FunctionType)
    }
    assert len(functions) >= 5
    wrong = [
        f"{name}: expected ({FUNCTIONS.get(name, 'not in FUNCTIONS')}), TorchRec has ({found})"
        for name, found in functions.items()
        if FUNCTIONS.get(name) != found
    ]
    assert not wrong, "\n".join(wrong)


def test_a_use_names_class_attribute_and_line() -> None:
    use = next(use for use in upstream.inherited_uses() if use.owner == "PipelinedForward")
    file, line = use.place.split(":")
    root = Path(inspect.getfile(_torchrec)).parents[1]
    assert use.name in (root / file).read_text().splitlines()[int(line) - 1]
    assert str(use).endswith(f": PipelinedForward.{use.name}")


def test_a_name_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INHERITED, "PipelinedForward", {"_module", "_moved_away"})
    with pytest.raises(AssertionError, match="PipelinedForward has no _moved_away any more"):
        test_their_classes_still_have_what_is_inherited("PipelinedForward")
    monkeypatch.setitem(FOREIGN, "torch.Tensor", {"_moved_away"})
    with pytest.raises(AssertionError, match="Tensor has no _moved_away any more"):
        test_their_objects_still_have_what_is_used("torch.Tensor")


def test_a_use_that_is_new_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INHERITED, "PipelinedForward", set())
    with pytest.raises(AssertionError, match=r"rewrite.*: PipelinedForward\._"):
        test_what_is_inherited_is_in_the_table()
    monkeypatch.setitem(SIGNATURES, "TrainPipelineSparseDist.progress", "dataloader")
    with pytest.raises(AssertionError, match=r"expected \(dataloader\), TorchRec has \(dataload"):
        test_overridden_methods_have_their_parameters()
