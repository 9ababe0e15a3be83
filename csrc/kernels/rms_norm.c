/* Root-mean-square norm. */
#include "../shoal.h"

#include <math.h>

struct norm {
    const float *x, *scale;
    float *out;
    int64_t size;
    float eps;
};

static void norm_row(void *context, int64_t row) {
    const struct norm *norm = context;
    const float *x = norm->x + row * norm->size;
    float *out = norm->out + row * norm->size;
    float sum = 0;
    for (int64_t i = 0; i < norm->size; i++) sum += x[i] * x[i];
    float factor = 1.0f / sqrtf(sum / (float)norm->size + norm->eps);
    for (int64_t i = 0; i < norm->size; i++) out[i] = x[i] * factor * norm->scale[i];
}

void KERNEL(shoal_rms_norm)(const float *x, const float *scale, float *out, int64_t rows, int64_t size, float eps) {
    struct norm norm = {x, scale, out, size, eps};
    shoal_parallel(rows, norm_row, &norm);
}
