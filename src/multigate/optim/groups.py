"""Which parameter is trained by what: Muon, AdamW with weight decay, AdamW without."""

from torch import nn

from multigate.residuals import Stack


def parameter_groups(model: nn.Module, muon: bool = True) -> dict[str, dict[str, nn.Parameter]]:
    """The parameters of a model with a `stack` (as GPT has), by group and name.

    muon       the matrices of the sublayers
    decayed    what else has two dimensions or more: the tied embedding, mixing maps
    undecayed  all below two dimensions, and what the residual exempts from weight decay

    With muon=False the matrices are among the decayed.
    """
    stack = getattr(model, "stack", None)
    names = [name for name, _ in model.named_parameters()]
    if not isinstance(stack, Stack) or any("_orig_mod" in name.split(".") for name in names):
        raise ValueError(
            f"parameter_groups needs a model with a Stack as its `stack`, got "
            f"{type(model).__name__}: hand in the model itself, not what torch.compile or "
            "DistributedDataParallel made of it."
        )
    exempt = {f"stack.residual.{name}" for name in stack.residual.undecayed()}
    groups: dict[str, dict[str, nn.Parameter]] = {"muon": {}, "decayed": {}, "undecayed": {}}
    for name, p in model.named_parameters():
        if p.ndim < 2 or name in exempt:
            groups["undecayed"][name] = p
        elif muon and p.ndim == 2 and name.startswith("stack.sublayers."):
            groups["muon"][name] = p
        else:
            groups["decayed"][name] = p
    return groups
