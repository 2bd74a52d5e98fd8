"""Imports the TorchRec and FBGEMM names that are private, undocumented or known to move.

All other files import public TorchRec modules, or names from here.
``tests/test_torchrec_insides.py`` checks their parameters and attributes in the installed release.
"""

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding_kernel import BaseEmbedding, get_state_dict
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from torchrec.distributed.planner.shard_estimators import (
    _get_optimizer_multipler as optimizer_multiplier,
)
from torchrec.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import BaseTwEmbeddingSharding
from torchrec.distributed.train_pipeline.backward_injection import BackwardHookWork, InjectionSite
from torchrec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from torchrec.distributed.train_pipeline.postproc import PipelinedPostproc
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward
from torchrec.distributed.train_pipeline.tracing import (
    GetAttrArgInfoStep,
    GetItemArgInfoStep,
    NoopArgInfoStep,
    Tracer,
)
from torchrec.distributed.train_pipeline.tracing import (
    _get_leaf_module_names as get_leaf_module_names,
)
from torchrec.distributed.train_pipeline.types import ArgInfo, BaseArgInfoStep, CallArgs
from torchrec.distributed.train_pipeline.utils import (
    _override_input_dist_forwards as override_input_dist_forwards,
)
from torchrec.distributed.train_pipeline.utils import _pipeline_detach_model as detach_model
from torchrec.distributed.train_pipeline.utils import _rewrite_model as rewrite_model
from torchrec.distributed.train_pipeline.utils import _start_data_dist as start_data_dist
from torchrec.distributed.train_pipeline.utils import _wait_for_batch as wait_for_batch
from torchrec.distributed.train_pipeline.utils import use_context_for_postprocs
from torchrec.distributed.types import QuantizedCommCodec, QuantizedCommCodecs, ShardingEnv2D
from torchrec.distributed.utils import append_prefix
from torchrec.modules.embedding_configs import data_type_to_sparse_type
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule
