/* Activations of gated MLPs. */
#include "../bf16.h"
#include "../shoal.h"

#include <math.h>

#define TASK_ELEMENTS 0x1000 /* fewer are not worth another thread */

/* e^x to a unit in the last place; e^-87 for all below -87, infinite from 88.4 on. A NaN stays one. */
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.5f ? 88.5f : x; /* 2^128 times a number that is not 0 */
    float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the last bits are the nearest whole number */
    float n = shifted - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
    float p = 1.9875691500e-4f; /* minimax polynomial for e^r (Cephes, expf) */
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000u + 127u) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float silu(float x) { return x / (1.0f + exp_of(-x)); }

/* 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x / (1 + e^-2u). */
static inline float gelu_tanh(float x) {
    return x / (1.0f + exp_of(-1.5957691216f * (x + 0.044715f * x * x * x)));
}

/* x times the normal distribution function; erfc by Abramowitz and Stegun, 7.1.26, within 1.5e-7. */
static inline float gelu(float x) {
    float z = fabsf(x) * 0.70710678f;
    float t = 1.0f / (1.0f + 0.3275911f * z);
    float p = 1.061405429f;
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    float half_erfc = 0.5f * p * t * exp_of(-z * z);
    return x * (x < 0.0f ? half_erfc : 1.0f - half_erfc);
}

/* See shoal_gated_activation. */
struct gated {
    const void *gate_up;
    void *out;
    int64_t rows, size, rows_per_task;
};

#define AS_IS(x) (x)
#define GATED_OF(ACTIVATION, TYPE, LOAD, STORE)                                                                \
    static void ACTIVATION##_##TYPE(void *context, int64_t task) {                                             \
        const struct gated *gated = context;                                                                   \
        int64_t size = gated->size, first = task * gated->rows_per_task, stop = first + gated->rows_per_task;  \
        for (int64_t row = first; row < stop && row < gated->rows; row++) {                                    \
            const TYPE *restrict gate = (const TYPE *)gated->gate_up + 2 * row * size;                         \
            const TYPE *restrict up = gate + size;                                                             \
            TYPE *restrict out = (TYPE *)gated->out + row * size;                                              \
            for (int64_t i = 0; i < size; i++) out[i] = STORE(ACTIVATION(LOAD(gate[i])) * LOAD(up[i]));        \
        }                                                                                                      \
    }
#define GATED(ACTIVATION)                                                                                      \
    GATED_OF(ACTIVATION, float, AS_IS, AS_IS)                                                                  \
    GATED_OF(ACTIVATION, uint16_t, bf16_to_float, float_to_bf16)

GATED(silu)
GATED(gelu_tanh)
GATED(gelu)

/* out [rows, size] = activation(gate) * up, where every row of gate_up [rows, 2 * size] is gate and up.
   activation: 0 silu, 1 gelu by tanh, 2 gelu. Both are bfloat16 where ``bf16`` is set, otherwise float. */
void KERNEL(shoal_gated_activation)(const void *gate_up, void *out, int64_t rows, int64_t size,
                                    int32_t activation, int32_t bf16) {
    static const shoal_task tasks[3][2] = {
        {silu_float, silu_uint16_t}, {gelu_tanh_float, gelu_tanh_uint16_t}, {gelu_float, gelu_uint16_t}};
    struct gated gated = {gate_up, out, rows, size, TASK_ELEMENTS / (size ? size : 1) + 1};
    int64_t count = (rows + gated.rows_per_task - 1) / gated.rows_per_task;
    shoal_parallel(count, tasks[activation][bf16 != 0], &gated);
}
