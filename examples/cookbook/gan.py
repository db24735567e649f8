"""Generative adversarial network: two optimizers with manual optimization.

With ``automatic_optimization = False`` the module steps its optimizers itself. ``toggle_optimizer`` freezes the
parameters of the other network, so that a step computes no gradients for it. The checks: each optimizer moves its own
network alone, and generated images become more like digits.
"""

from __future__ import annotations

from typing import Any

import torch
from tasks import NO_FILES, digit_loaders, digits, recipe_options
from torch import Tensor, nn

from phalanx import Trainer, TrainModule, seed_everything


class GAN(TrainModule):
    automatic_optimization = False

    def __init__(self, code: int = 16, width: int = 128) -> None:
        super().__init__()
        self.code = code
        self.generator = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, count: int) -> Tensor:
        images: Tensor = self.generator(torch.randn(count, self.code, device=self.device))
        return images

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0]
        generator, critic = self.optimizers()

        self.toggle_optimizer(critic)
        scores = self.critic(torch.cat([real, self(len(real)).detach()]))
        is_real = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(scores)
        self._step(critic, "critic_loss", nn.functional.binary_cross_entropy_with_logits(scores, is_real))
        assert all(parameter.grad is None for parameter in self.generator.parameters())
        self.untoggle_optimizer(critic)

        self.toggle_optimizer(generator)
        self._step(generator, "generator_loss", nn.functional.softplus(-self.critic(self(len(real)))).mean())
        self.untoggle_optimizer(generator)

    def _step(self, optimizer: Any, name: str, loss: Tensor) -> None:
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.log(name, loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.5, 0.999)}
        return [torch.optim.Adam(net.parameters(), **settings) for net in (self.generator, self.critic)]


@torch.no_grad()
def distance(model: GAN) -> float:
    """Return the mean distance between the pixels' means of generated and of real images."""
    return float((model(512).mean(dim=0) - digits().tensors[0].mean(dim=0)).abs().mean())


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    model = GAN()
    before = distance(model)
    Trainer(max_epochs=8 if options.short else 100, **NO_FILES).fit(model, digit_loaders()[0])
    after = distance(model)
    print(f"distance from the mean digit: {before:.3f} before, {after:.3f} after training")
    assert after < before / 2


if __name__ == "__main__":
    main()
