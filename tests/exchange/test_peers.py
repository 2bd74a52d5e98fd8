"""What is taken for a broken exchange, and what for this rank's own failure."""

from typing import Any

import pytest
import torch.distributed as dist

from torchrec_picasso.errors import PeerError
from torchrec_picasso.exchange.peers import Peers


class _Alone:
    """A process group of one rank, without a store."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def get_group_store(self) -> Any:
        raise RuntimeError("no store")


class _OwnError(RuntimeError):
    pass


IN_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer"


def _raise(error: Exception) -> None:
    with Peers(_Alone()).propagate_errors(lambda: "step 3"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(IN_GLOO),
        RuntimeError("[enforce fail at /src/gloo/transport/tcp/pair.cc:446] 184 vs 4"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistNetworkError("the store is gone"),
    ],
)
def test_a_broken_exchange_is_explained(error: Exception) -> None:
    with pytest.raises(PeerError, match="rank 0 waited in vain in step 3") as caught:
        _raise(error)
    assert str(error) in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the column gloomy has 3 values, igloo 4"),
        RuntimeError("gloo is what this model was trained with"),
        RuntimeError("the feature store said: connection reset by peer"),
        _OwnError(IN_GLOO),
        ValueError(IN_GLOO),
    ],
)
def test_a_models_own_words_stay(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        _raise(error)
    assert caught.value is error
