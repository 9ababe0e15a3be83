/* RMS norms with residual sums. */
#include "../bf16.h"
#include "../shoal.h"

#include <math.h>

#define LANES 16             /* partial sums: as many on every instruction set, so that results are the same */
#define TASK_ELEMENTS 0x2000 /* fewer are not worth another thread */

/* What both element types share; see shoal_residual_norm below. */
struct norm {
    const void *x, *residual;
    const float *before, *after;
    void *sum, *out;
    int64_t rows, size, rows_per_task;
    float eps;
};

static int64_t tasks_of(struct norm *norm) {
    norm->rows_per_task = TASK_ELEMENTS / (norm->size ? norm->size : 1) + 1;
    return (norm->rows + norm->rows_per_task - 1) / norm->rows_per_task;
}

/* 1 / sqrt(mean + eps) from partial sums of squares. */
static float factor_of(const float *partial, const struct norm *norm) {
    float sum = 0;
    for (int j = 0; j < LANES; j++) sum += partial[j];
    return 1.0f / sqrtf(sum / (float)norm->size + norm->eps);
}

#define AS_IS(x) (x)
#define NORM_OF(TYPE, LOAD, STORE)                                                                            \
    static float factor_##TYPE(const TYPE *restrict x, const struct norm *norm) {                             \
        float partial[LANES] = {0};                                                                           \
        int64_t i = 0;                                                                                        \
        for (; i + LANES <= norm->size; i += LANES)                                                           \
            for (int j = 0; j < LANES; j++) partial[j] += LOAD(x[i + j]) * LOAD(x[i + j]);                    \
        for (int j = 0; i < norm->size; i++, j++) partial[j] += LOAD(x[i]) * LOAD(x[i]);                      \
        return factor_of(partial, norm);                                                                      \
    }                                                                                                         \
                                                                                                              \
    static void scale_##TYPE(const TYPE *x, float factor, const float *restrict scale, TYPE *out,             \
                             int64_t size) {                                                                  \
        for (int64_t i = 0; i < size; i++) out[i] = STORE(LOAD(x[i]) * factor * scale[i]);                    \
    }                                                                                                         \
                                                                                                              \
    static void row_##TYPE(const struct norm *norm, int64_t row) {                                            \
        int64_t at = row * norm->size;                                                                        \
        const TYPE *x = (const TYPE *)norm->x + at;                                                           \
        TYPE *sum = norm->sum ? (TYPE *)norm->sum + at : 0;                                                   \
        if (norm->before) {                                                                                   \
            scale_##TYPE(x, factor_##TYPE(x, norm), norm->before, sum, norm->size);                           \
            x = sum;                                                                                          \
        }                                                                                                     \
        if (norm->residual) {                                                                                 \
            const TYPE *residual = (const TYPE *)norm->residual + at;                                         \
            for (int64_t i = 0; i < norm->size; i++) sum[i] = STORE(LOAD(residual[i]) + LOAD(x[i]));          \
            x = sum;                                                                                          \
        }                                                                                                     \
        if (norm->after)                                                                                      \
            scale_##TYPE(x, factor_##TYPE(x, norm), norm->after, (TYPE *)norm->out + at, norm->size);         \
    }                                                                                                         \
                                                                                                              \
    static void task_##TYPE(void *context, int64_t task) {                                                    \
        const struct norm *norm = context;                                                                    \
        int64_t first = task * norm->rows_per_task, stop = first + norm->rows_per_task;                       \
        for (int64_t row = first; row < stop && row < norm->rows; row++) row_##TYPE(norm, row);               \
    }

NORM_OF(float, AS_IS, AS_IS)
NORM_OF(uint16_t, bf16_to_float, float_to_bf16)

/* sum = residual + norm(x) * before, out = norm(sum) * after, over rows of ``size`` elements, where
   norm(x) = x / sqrt(mean(x^2) + eps). Without ``before`` x is added as it is, without ``residual`` nothing is
   added (then ``sum`` may be missing if ``before`` is, too), without ``after`` there is no ``out``. The scales
   are float [size], all else is bfloat16 where ``bf16`` is set, otherwise float. No two of them overlap. */
void KERNEL(shoal_residual_norm)(const void *x, const float *before, const void *residual, void *sum,
                                 const float *after, void *out, int64_t rows, int64_t size, float eps,
                                 int32_t bf16) {
    struct norm norm = {x, residual, before, after, sum, out, rows, size, 0, eps};
    shoal_parallel(tasks_of(&norm), bf16 ? task_uint16_t : task_float, &norm);
}
