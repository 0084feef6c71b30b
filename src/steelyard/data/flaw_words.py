"""A flaw in a few words, for the tables and reports that name flawed clients."""

from __future__ import annotations

from steelyard.data.flaw_settings import FlawSettings


def in_words(flaw: FlawSettings, of: str = "") -> str:
    """Say in a few words what is wrong with a client that has this flaw; `of` is the client that a copy copies."""
    percent = f"{100 * flaw.size:g}%"
    match flaw.kind:
        case "labels-flipped":
            if flaw.how == "class":
                return f"class {flaw.classes[0]} labelled {flaw.target} ({percent})"
            return f"labels flipped {'in pairs ' if flaw.how == 'pairs' else ''}({percent})"
        case "noisy":
            return f"noise of {flaw.size:g} standard deviation{'' if flaw.size == 1 else 's'}"
        case "blurred":
            return f"blurred (sigma {flaw.size:g})"
        case "missing":
            return f"features missing ({percent})"
        case "rows-repeated":
            return f"rows repeated {flaw.size:g} times"
        case "classes-missing":
            named = ", ".join(map(str, flaw.classes))
            return f"classes {named} missing" if named else f"classes missing ({percent})"
        case "few-steps":
            return f"few steps ({percent} of the rows)"
        case "stale":
            return f"model {flaw.size:g} round{'' if flaw.size == 1 else 's'} old"
        case "copy":
            return f"copy of {of}"
        case "own-model":
            return "trains its own model"
        case "free-rider":
            return "colluding free rider" if flaw.how == "colluding" else "free rider"
        case "claims-size":
            return f"claims {flaw.size:g} times its size{_since(flaw)}"
        case "claims-criteria":
            return f"inflates its criteria{_since(flaw)}"
        case "reversed":
            return f"update reversed, {flaw.size:g} times"
        case "gaussian":
            return f"update of noise, {flaw.size:g} times"
        case "alie":
            return f"ALIE ({flaw.size:g} standard deviations)"
        case "ipm":
            return f"IPM ({flaw.size:g} times)"
        case "min-max":
            return "min-max"
        case "adaptive":
            return f"adaptive ({flaw.how})"
        case "boosted":
            return f"boosted to replace the model{'' if flaw.size == 1 else f', {flaw.size:g} times'}"
        case "bias":
            return f"bias of class {flaw.target} pushed, {flaw.size:g} times"
        case "backdoor":
            kind = "semantic backdoor" if flaw.how == "semantic" else "backdoor"
            return f"{kind} to class {flaw.target} ({percent} of the rows)"


def _since(flaw: FlawSettings) -> str:
    return "" if flaw.from_round is None else f" from round {flaw.from_round}"
