/* Gated activations of MLPs: activation(gate) * up. */
#include "../activation.h"
#include "../bf16.h"
#include "../shoal.h"

#define TASK_ELEMENTS 0x1000 /* fewer are not worth another thread */

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
GATED(gelu_erf)

/* out [rows, size] = activation(gate) * up, where every row of gate_up [rows, 2 * size] is gate and up.
   activation: an ``enum activation``. Both are bfloat16 where ``bf16`` is set, otherwise float. */
void KERNEL(shoal_gated_activation)(const void *gate_up, void *out, int64_t rows, int64_t size,
                                    int32_t activation, int32_t bf16) {
    static const shoal_task tasks[][2] = {
        [SILU] = {silu_float, silu_uint16_t},
        [GELU_TANH] = {gelu_tanh_float, gelu_tanh_uint16_t},
        [GELU_ERF] = {gelu_erf_float, gelu_erf_uint16_t},
    };
    struct gated gated = {gate_up, out, rows, size, TASK_ELEMENTS / (size ? size : 1) + 1};
    int64_t count = (rows + gated.rows_per_task - 1) / gated.rows_per_task;
    shoal_parallel(count, tasks[activation][bf16 != 0], &gated);
}
