"""The forward passes of twelve families in float64 NumPy, from tensors named as in `transformers`.

It is written from published forward passes, and uses nothing of ours: no layer, and no setting.

    L  tokens   D  model width   H  query heads   G  key-value heads   K  width of a head
"""

import math

import numpy as np


def rms(x, weight, eps, offset=0.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (weight + offset)


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def gelu_tanh(u):
    return 0.5 * u * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def silu(u):
    return u / (1 + np.exp(-u))


def plain_frequencies(theta, width):
    return theta ** (-np.arange(0, width, 2) / width)


def llama3(f, s, low, high, original):
    turns = original * f / (2 * math.pi)
    m = (turns - low) / (high - low)
    between = m * f + (1 - m) * f / s
    return np.where(turns < low, f / s, np.where(turns > high, f, between))


def yarn(f, theta, s, original, fast=32.0, slow=1.0):
    width = 2 * len(f)
    d = lambda x: width * math.log(original / (2 * math.pi * x)) / (2 * math.log(theta))
    low, high = max(math.floor(d(fast)), 0), min(math.ceil(d(slow)), width - 1)
    ramp = np.clip((np.arange(len(f)) - low) / (high - low), 0, 1)
    return f * (1 - ramp) + f / s * ramp


def rotate(x_LHK, f, a=1.0):
    width, angle = 2 * len(f), np.arange(len(x_LHK))[:, None, None] * f
    low, high, rest = np.split(x_LHK, [len(f), width], axis=-1)
    cos, sin = a * np.cos(angle), a * np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def attend(q_LHK, k_LGK, v_LGK, scale, window=None, cap=None):
    length, heads = q_LHK.shape[:2]
    k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k_LGK, v_LGK))
    scores = np.einsum("lhk,mhk->hlm", q_LHK, k) * scale
    if cap:
        scores = cap * np.tanh(scores / cap)
    behind = np.arange(length)[:, None] - np.arange(length)
    scores = np.where((behind >= 0) & (behind < (window or length)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hlm,mhk->lhk", weights, v).reshape(length, -1)


def gpt2(t, tokens, n, heads, eps=1e-5):
    x = t["transformer.wte.weight"][tokens] + t["transformer.wpe.weight"][: len(tokens)]
    for i in range(n):
        of = lambda name, i=i: (t[f"transformer.h.{i}.{name}.{end}"] for end in ("weight", "bias"))
        w, b = of("attn.c_attn")
        fused = layer_norm(x, *of("ln_1"), eps) @ w + b
        q, k, v = (part.reshape(len(x), heads, -1) for part in np.split(fused, 3, axis=-1))
        w, b = of("attn.c_proj")
        x = x + attend(q, k, v, q.shape[-1] ** -0.5) @ w + b
        (w, b), (w_out, b_out) = of("mlp.c_fc"), of("mlp.c_proj")
        x = x + gelu_tanh(layer_norm(x, *of("ln_2"), eps) @ w + b) @ w_out + b_out
    x = layer_norm(x, t["transformer.ln_f.weight"], t["transformer.ln_f.bias"], eps)
    return x @ t["transformer.wte.weight"].T


# What a config.json says of each: of small models (`families`), with frequencies in place of theta.
F8, F16 = (lambda theta, width=width: plain_frequencies(theta, width) for width in (8, 16))
FAMILIES = {
    "llama": {"f": llama3(F8(5e5), 8, 1, 4, 32)},
    "qwen2": {"f": yarn(F8(1e6), 1e6, 4, 64), "a": 0.1 * math.log(4) + 1},
    "qwen3": {"f": F16(1e6)},
    "mistral": {"f": F8(1e4), "windows": lambda i: 5},
    "gemma2": {
        "f": F16(1e4),
        "windows": lambda i: 5 if i % 2 == 0 else None,
        "scale": 24**-0.5,
        "cap": 50.0,
        "final_cap": 30.0,
    },
    "gemma3_text": {
        "f": F16(1e6) / 8,
        "window_f": F16(1e4),
        "windows": lambda i: None if (i + 1) % 6 == 0 else 5,
        "scale": 24**-0.5,
    },
    "olmo2": {"f": F8(5e5), "eps": 1e-5},
    "phi3": {"f": plain_frequencies(1e4, 4), "eps": 1e-5, "windows": lambda i: 6},
    "mixtral": {"f": F8(1e6), "eps": 1e-5, "active": 2},
    "qwen3_moe": {"f": F16(1e6), "active": 3},
    # The rank of latents, the numbers that turn and those that do not, and the width of values.
    "deepseek_v3": {
        "f": yarn(plain_frequencies(1e4, 6), 1e4, 4, 16),
        "latents": (12, 6, 8, 10),
        "scale": 14**-0.5 * (0.1 * math.log(4) + 1) ** 2,
        "active": 3,
    },
}


def latent_attention(w, h, heads, own):
    """Attention of a DeepSeek-V3: numbers that turn are neighbours."""
    rank, turning, plain, width = own["latents"]
    halves = lambda x: np.concatenate([x[..., 0::2], x[..., 1::2]], -1)
    q = rms(h @ w("self_attn.q_a_proj").T, w("self_attn.q_a_layernorm"), 1e-6)
    q = (q @ w("self_attn.q_b_proj").T).reshape(len(h), heads, -1)
    joint = h @ w("self_attn.kv_a_proj_with_mqa").T
    kv = rms(joint[:, :rank], w("self_attn.kv_a_layernorm"), 1e-6) @ w("self_attn.kv_b_proj").T
    kv = kv.reshape(len(h), heads, plain + width)
    k_turned = np.repeat(rotate(halves(joint[:, None, rank:]), own["f"]), heads, axis=1)
    q = np.concatenate([q[..., :plain], rotate(halves(q[..., plain:]), own["f"])], -1)
    k = np.concatenate([kv[..., :plain], k_turned], -1)
    assert q.shape[-1] == plain + turning
    return attend(q, k, kv[..., plain:], own["scale"]) @ w("self_attn.o_proj").T


def experts(w, h, family, active, bias=None):
    """Each token through those experts that its router scores highest."""
    mlp = "block_sparse_moe" if family == "mixtral" else "mlp"
    gate, up, down = (
        ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    out = np.zeros_like(h)
    for token, logits in enumerate(h @ w(f"{mlp}.gate").T):
        if family == "deepseek_v3":
            row = 1 / (1 + np.exp(-logits))
            groups = (row + bias).reshape(4, -1)
            best = np.sort(groups, -1)[:, -2:].sum(-1)
            groups[np.argsort(-best, kind="stable")[2:]] = -np.inf
            chosen = np.argsort(-groups.reshape(-1), kind="stable")[:active]
        else:
            row = np.exp(logits) / np.exp(logits).sum()
            chosen = np.argsort(-row, kind="stable")[:active]
        total = 1.0 if family == "qwen3_moe" else row[chosen].sum()
        total /= 2.5 if family == "deepseek_v3" else 1.0
        for e in chosen:
            of = lambda name, e=e: w(f"{mlp}.experts.{e}.{name}")
            inner = silu(h[token] @ of(gate).T) * (h[token] @ of(up).T)
            out[token] += row[e] / total * (inner @ of(down).T)
    return out


def block(t, x, i, family, heads, own):
    """One layer of a family other than GPT-2."""
    w = lambda name: t[f"model.layers.{i}.{name}.weight"]
    is_gemma, eps = family.startswith("gemma"), own.get("eps", 1e-6)
    norm = lambda name, x: rms(x, w(name), eps, float(is_gemma))
    h = x if family == "olmo2" else norm("input_layernorm", x)
    if "latents" in own:
        x = x + latent_attention(w, h, heads, own)
        return feed_forward(t, x, i, family, own, w, norm)
    if family == "phi3":
        groups = t["model.layers.0.self_attn.qkv_proj.weight"].shape[0] // 8 - heads
        cuts = [heads * 8, (heads + groups // 2) * 8]
        q, k, v = (h @ part.T for part in np.split(w("self_attn.qkv_proj"), cuts))
    else:
        q, k, v = (h @ w(f"self_attn.{name}_proj").T for name in "qkv")
    if family == "qwen2":
        q, k, v = (
            x + t[f"model.layers.{i}.self_attn.{name}_proj.bias"]
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
    if family == "olmo2":
        q, k = norm("self_attn.q_norm", q), norm("self_attn.k_norm", k)
    width = q.shape[-1] // heads
    q, k, v = (x.reshape(len(x), -1, width) for x in (q, k, v))
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        q, k = norm("self_attn.q_norm", q), norm("self_attn.k_norm", k)
    window = own.get("windows", lambda i: None)(i)
    f = own["window_f"] if window and "window_f" in own else own["f"]
    q, k = (rotate(x, f, own.get("a", 1.0)) for x in (q, k))
    out = attend(q, k, v, own.get("scale", width**-0.5), window, own.get("cap"))
    out = out @ w("self_attn.o_proj").T
    is_behind = is_gemma or family == "olmo2"
    x = x + (norm("post_attention_layernorm", out) if is_behind else out)
    return feed_forward(t, x, i, family, own, w, norm)


def feed_forward(t, x, i, family, own, w, norm):
    """The second half of a layer."""
    is_gemma = family.startswith("gemma")
    is_behind = is_gemma or family == "olmo2"
    name = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
    h = x if family == "olmo2" else norm(name, x)
    if f"model.layers.{i}.mlp.gate.weight" in t or family == "mixtral":
        bias = t.get(f"model.layers.{i}.mlp.gate.e_score_correction_bias")
        shared = 0.0
        if family == "deepseek_v3":
            gate, up, down = (w(f"mlp.shared_experts.{n}_proj").T for n in ("gate", "up", "down"))
            shared = (silu(h @ gate) * (h @ up)) @ down
        return x + experts(w, h, family, own["active"], bias) + shared
    if family == "phi3":
        gate, up = np.split(h @ w("mlp.gate_up_proj").T, 2, axis=-1)
    else:
        gate, up = h @ w("mlp.gate_proj").T, h @ w("mlp.up_proj").T
    out = (gelu_tanh(gate) if is_gemma else silu(gate)) * up @ w("mlp.down_proj").T
    return x + (norm("post_feedforward_layernorm", out) if is_behind else out)


def logits(family, t, tokens, n=7, heads=4):
    """[L, V] of tokens [L]."""
    if family == "gpt2":
        return gpt2(t, tokens, n, heads)
    own, is_gemma = FAMILIES[family], family.startswith("gemma")
    table = t["model.embed_tokens.weight"]
    x = table[tokens] * (math.sqrt(table.shape[1]) if is_gemma else 1.0)
    for i in range(n):
        x = block(t, x, i, family, heads, own)
    x = rms(x, t["model.norm.weight"], own.get("eps", 1e-6), float(is_gemma))
    out = x @ (table if is_gemma else t["lm_head.weight"]).T
    cap = own.get("final_cap")
    return cap * np.tanh(out / cap) if cap else out
