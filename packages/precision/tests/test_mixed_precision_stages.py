"""The dtype at each stage of mixed-precision training, as a whole loop shows it."""

import pytest
import torch
from torch import nn

from trainwright.precision import DynamicLossScaler, MasterWeights, policy

FP32 = torch.float32


class RecordingAdamW(torch.optim.AdamW):
    """Notes the dtypes of weights, gradients and moments that an update uses."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def step(self, closure=None):
        result = super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                moments = {value.dtype for value in self.state[weight].values()}
                self.seen.append((weight.dtype, weight.grad.dtype, moments))
        return result


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_each_stage_has_the_dtype_that_mixed_precision_prescribes(name):
    narrow = {"float16": torch.float16, "bfloat16": torch.bfloat16}[name]
    stages = {}
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    stages["1 initial weights"] = {p.dtype for p in model.parameters()}
    applied = policy(name).apply(model)
    inner = []

    def factory(groups):
        inner.append(RecordingAdamW(groups, lr=1e-3))
        return inner[0]

    optimizer = MasterWeights(model.named_parameters(), factory, originals=applied.originals)
    scaler = DynamicLossScaler(2.0**8)
    products, product_gradients = set(), set()

    def watch(module, args, output):
        products.update({args[0].dtype, module.weight.dtype, output.dtype})
        # What autograd hands back before it is summed: the gradient of a 16-bit product.
        output.grad_fn.register_prehook(
            lambda gradients: product_gradients.update(g.dtype for g in gradients)
        )

    for module in (model[0], model[2]):
        module.register_forward_hook(watch)

    prediction = model(torch.randn(6, 4))
    loss = nn.functional.mse_loss(prediction, torch.randn(6, 2))
    scaled = scaler.scale(loss)
    scaled.backward()
    stages["2 forward on cast copies"] = products
    stages["3 scaled loss"] = {prediction.dtype, loss.dtype, scaled.dtype}
    stages["4 gradients of products"] = product_gradients
    before = [p.grad.clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    stages["5 unscaled gradients"] = {p.grad.dtype for p in model.parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    stages["5 norm of true gradients"] = {norm.dtype}
    applied_step = scaler.step(optimizer)
    seen = inner[0].seen
    stages["6 update"] = {d for weight, grad, _ in seen for d in (weight, grad)}
    stages["6 moments"] = {d for _, _, moments in seen for d in moments}
    stages["6 refreshed copies"] = {p.dtype for p in model.parameters()}

    assert applied_step
    assert stages == {
        "1 initial weights": {FP32},
        "2 forward on cast copies": {narrow},
        "3 scaled loss": {FP32},
        "4 gradients of products": {narrow},
        "5 unscaled gradients": {FP32},
        "5 norm of true gradients": {FP32},
        "6 update": {FP32},
        "6 moments": {FP32},
        "6 refreshed copies": {narrow},
    }
    true_norm = torch.cat([g.flatten() / 2.0**8 for g in before]).double().norm()
    assert norm.item() == pytest.approx(true_norm.item(), rel=1e-6)
    for scaled_gradient, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(scaled_gradient / 2.0**8, parameter.grad)
    for parameter_name, parameter in model.named_parameters():
        master = optimizer.state_dict()["masters"][parameter_name]
        assert torch.equal(master.to(narrow), parameter)
