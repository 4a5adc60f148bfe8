"""Every loss scaler keeps the laws."""

import pytest
from hypothesis import given

from trainwright.precision import (
    DynamicLossScaler,
    LossScaler,
    StaticLossScaler,
    UnitLossScaler,
)
from trainwright.precision.testing import LOSS_SCALER_LAWS, sequences

MAKERS = {
    "dynamic": lambda comm: DynamicLossScaler(2.0**16, growth_interval=2, communicator=comm),
    "static": lambda comm: StaticLossScaler(2.0**10, communicator=comm),
    "unit": lambda comm: UnitLossScaler(communicator=comm),
}


@pytest.mark.parametrize("law", LOSS_SCALER_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("maker", MAKERS)
@given(sequence=sequences())
def test_every_scaler_keeps_the_law(law, maker, sequence):
    law(MAKERS[maker], sequence)


@pytest.mark.parametrize("maker", MAKERS)
def test_every_scaler_has_the_protocol(maker):
    assert isinstance(MAKERS[maker](None), LossScaler)
