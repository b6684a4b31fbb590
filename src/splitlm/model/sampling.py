"""Logits to one token id: the arithmetic behind ``core.sampling.Sampling``.

The filters and their order are those of transformers' ``generate`` (repetition penalty, temperature, top-k, top-p,
min-p), so that a setting means here what it means there.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from splitlm.core.errors import ModelError
from splitlm.core.sampling import Sampling

_COLDEST = torch.finfo(torch.float32).tiny  # below this a division by the temperature is one by zero
_NUCLEUS = 1024  # tokens that top-p looks at before it sorts all


class Sampler:
    """Chooses the tokens of one session.

    Args:
        sampling: the session's settings.
        prompt: the prompt's token ids; the repetition penalty counts them as seen.

    Attributes:
        seed: of this session's generator; drawn when ``sampling.seed`` is None, so a run can be repeated either way.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        # On the CPU whatever the model's device: one seed then means one stream of random numbers everywhere.
        self._random = torch.Generator().manual_seed(self.seed)
        self._position = len(prompt)
        self._seen = dict.fromkeys(prompt) if sampling.needs_history else {}
        self._seen_ids = torch.tensor(list(self._seen), dtype=torch.long)

    def next(self, logits: Tensor, position: int | None = None) -> int:
        """The next token's id, which is also added to the history.

        Args:
            logits: ``[vocab]``, any float dtype and device; not modified.
            position: the token's place in the sequence, for messages; None counts on from the prompt.

        Greedy takes the largest logit, and the first of several equal ones. It neither copies nor sorts.

        Raises:
            ModelError: the logits hold a NaN or +inf, or nothing but -inf.
        """
        if position is not None:
            self._position = position
        if self.sampling.greedy:
            token = self._largest(self._penalised(logits))
        else:
            ids, probabilities = self.distribution(logits)
            token = int(ids[self._draw(probabilities)])
        self._position += 1
        if self.sampling.needs_history and token not in self._seen:
            self._seen[token] = None
            self._seen_ids = torch.cat((self._seen_ids, torch.tensor([token])))
        return token

    def distribution(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """What a token would be drawn from now, without drawing: ids and fp32 probabilities, both ``[candidates]``.

        Tokens that a filter drops are left out or have probability 0. Temperature 0 gives one candidate.

        Raises:
            ModelError: as ``next``.
        """
        scores = self._penalised(logits).float()
        best = self._largest(scores)
        if self.sampling.greedy:
            return torch.tensor([best], device=scores.device), torch.ones(1, device=scores.device)
        ids, scores = self._top_k(scores)
        # Softmax does not see the shift, and without it a very low temperature would overflow.
        scores = (scores - scores.max()) / max(self.sampling.temperature, _COLDEST)
        ids, probabilities = self._top_p(ids, torch.softmax(scores, dim=-1))
        return ids, self._min_p(probabilities)

    def _penalised(self, logits: Tensor) -> Tensor:
        if self.sampling.repetition_penalty == 1.0 or not len(self._seen_ids):
            return logits
        scores = logits.float().clone()
        seen = self._seen_ids.to(scores.device)
        seen = seen[seen < len(scores)]  # a tokenizer may know ids that the head does not
        hit = scores[seen]
        penalty = self.sampling.repetition_penalty
        scores[seen] = torch.where(hit < 0, hit * penalty, hit / penalty)
        return scores

    def _largest(self, scores: Tensor) -> int:
        """The index of the largest score. A NaN wins torch's argmax, so one look at the winner is enough."""
        index = int(scores.argmax())
        value = float(scores[index])
        if not math.isfinite(value):
            found = "are all -inf" if value == -math.inf else f"hold a {value}"
            raise ModelError(
                f"the logits for position {self._position} {found}",
                expected="finite numbers",
                remedy="Check the checkpoint, or compute in float32 if this was float16",
            )
        return index

    def _top_k(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if not 0 < self.sampling.top_k < len(scores):
            return torch.arange(len(scores), device=scores.device), scores
        least = torch.topk(scores, self.sampling.top_k, sorted=True).values[-1]
        ids = torch.nonzero(scores >= least).squeeze(1)  # tokens equal to the k-th stay, as in transformers
        return ids, scores[ids]

    def _top_p(self, ids: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps a token when those before it, in falling order, have less than p together; so always the first."""
        p, count = self.sampling.top_p, len(probabilities)
        if p >= 1.0:
            return ids, probabilities
        # Sorting a whole vocabulary takes milliseconds, and the nucleus is nearly always small.
        for size in (min(_NUCLEUS, count), count):
            falling, order = torch.topk(probabilities, size)
            kept = falling.cumsum(dim=-1, dtype=torch.float64) - falling < p
            if not kept[-1]:
                break
        falling = falling[kept]
        return ids[order[kept]], falling / falling.sum()

    def _min_p(self, probabilities: Tensor) -> Tensor:
        if self.sampling.min_p <= 0.0:
            return probabilities
        kept = probabilities.masked_fill(probabilities < self.sampling.min_p * probabilities.max(), 0.0)
        return kept / kept.sum()

    def _draw(self, probabilities: Tensor) -> int:
        """An index, by inverting the cumulative sum: one random number a token, however many candidates there are."""
        cumulative = probabilities.cpu().cumsum(dim=-1, dtype=torch.float64)
        point = torch.rand(1, dtype=torch.float64, generator=self._random) * cumulative[-1]
        index = int(torch.searchsorted(cumulative, point, right=True))
        return min(index, len(cumulative) - 1)
