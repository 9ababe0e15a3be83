/* Gated activations of odd sizes stay inside their buffers, for all values. */
#include "guard.h"

#include "../kernels/activations.c"

static void test(int64_t rows, int64_t size, int32_t activation, float value) {
    size_t count = (size_t)(rows * size);
    float *gate_up = guarded(2 * count * sizeof *gate_up), *out = guarded(count * sizeof *out);
    uint16_t *halves = guarded(2 * count * sizeof *halves), *half_out = guarded(count * sizeof *half_out);
    for (size_t i = 0; i < 2 * count; i++) gate_up[i] = value, halves[i] = float_to_bf16(value);
    KERNEL(shoal_gated_activation)(gate_up, out, rows, size, activation, 0);
    KERNEL(shoal_gated_activation)(halves, half_out, rows, size, activation, 1);
    for (size_t i = 0; i < count; i++) {
        float expected = value > 0 ? value * value : 0;
        CHECK(isnan(value) ? isnan(out[i]) : out[i] == expected || fabsf(out[i] - expected) < 1e-3f);
        CHECK(isnan(value) == isnan(bf16_to_float(half_out[i])));
    }
}

int main(void) {
    float values[] = {0, -20, 20, -1e4f, 1e15f, NAN};
    for (int32_t activation = SILU; activation <= GELU_ERF; activation++)
        for (int at = 0; at < 6; at++)
            for (int64_t size = 1; size < 70; size += 17) test(3, size, activation, values[at]);
    test(0, 16, SILU, 1);
    test(40, 577, GELU_TANH, 0);
    return 0;
}
