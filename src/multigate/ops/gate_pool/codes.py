"""What inverting a step loses, kept in two bits an element: the old streams to the last bit.

The guess is the inverted stream, rounded to the dtype of the streams. Floats of one dtype are
numbered in their order, and nearly always the true number is the guess or a neighbour of it:

    code 0, 1, 2: one below, equal, one above        3: further away, and listed as it is

The list is in the order of the elements. Under torch.compile, where its length has to be known, it
has room for one in `LISTED` of them; what is beyond that is lost, and counted. There the guess and
the codes are made inside of operators: a compiler that leaves out a rounding changes the guess.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

LISTED = 20
BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def room_for(true: Tensor, one_in: int) -> int:
    return -(-true.numel() // one_in)


def encode(true: Tensor, guess: Tensor, room: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, four a byte; the list; and how many elements it had no room for.

    `room` is the length of the list; None makes it as long as it has to be.
    """
    true = true.reshape(-1)
    # Numbers wrap around at the ends, in `decode` as here.
    above = numbered(true) - numbered(guess.reshape(-1)) + 1
    far = (above < 0) | (above > 2)
    code = torch.where(far, 3, above).to(torch.uint8)
    four = F.pad(code, (0, -len(code) % 4)).view(-1, 4)
    packed = four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6
    if room is None:
        return packed, true[far], torch.zeros((), dtype=torch.int64, device=true.device)
    place = far.cumsum(0) - 1
    lost = (far.sum() - room).clamp(min=0)
    # What is not listed goes to one place behind the list.
    place = torch.where(far, place, room).clamp(max=room)
    return packed, true.new_zeros(room + 1).scatter(0, place, true)[:room].clone(), lost


def decode(packed: Tensor, listed: Tensor, guess: Tensor) -> Tensor:
    """The true numbers, in the shape of `guess`."""
    flat = guess.reshape(-1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    code = (packed.unsqueeze(1) >> shifts & 3).view(-1)[: len(flat)]
    far = code == 3
    order = numbered(flat)
    near = unnumbered(order + torch.where(far, 0, code.to(order.dtype) - 1), flat.dtype)
    place = (far.cumsum(0) - 1).clamp(0, len(listed))
    known = F.pad(listed, (0, 1))[place]
    return torch.where(far & (place < len(listed)), known, near).view(guess.shape)


def numbered(x: Tensor) -> Tensor:
    """The place of every float in their order, as integers of its size; -0 is before 0."""
    bits = x.view(BITS[x.dtype])
    return torch.where(bits < 0, ~(bits & torch.iinfo(bits.dtype).max), bits)


def unnumbered(order: Tensor, dtype: torch.dtype) -> Tensor:
    bits = torch.where(order < 0, ~order + torch.iinfo(order.dtype).min, order)
    return bits.view(dtype)
