"""Records of a step as a process tells them."""


def process_step(step, step_time_s):
    numbers = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": False}
    return {
        "step": step,
        "intervals": [(0, "F", 0, 0.0, 1.0)],
        "link_bytes": {},
        "step_time_s": step_time_s,
        "input_wait_s": step_time_s / 8,
        **numbers,
    }
