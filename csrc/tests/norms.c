/* Norms of odd sizes stay inside their buffers; a row of ones has the norm of ones. */
#include "guard.h"

#include "../kernels/norms.c"

static void test(int64_t rows, int64_t size, int32_t bf16) {
    size_t bytes = (size_t)(rows * size) * (bf16 ? 2 : 4);
    void *x = guarded(bytes), *residual = guarded(bytes), *sum = guarded(bytes), *out = guarded(bytes);
    float *scale = guarded((size_t)size * sizeof *scale);
    for (int64_t i = 0; i < size; i++) scale[i] = 1;
    for (int64_t i = 0; i < rows * size; i++) {
        if (bf16) ((uint16_t *)x)[i] = float_to_bf16(1), ((uint16_t *)residual)[i] = float_to_bf16(2);
        else ((float *)x)[i] = 1, ((float *)residual)[i] = 2;
    }
    KERNEL(shoal_residual_norm)(x, scale, residual, sum, scale, out, rows, size, 0, bf16);
    for (int64_t i = 0; i < rows * size; i++) {
        float three = bf16 ? bf16_to_float(((uint16_t *)sum)[i]) : ((float *)sum)[i];
        float one = bf16 ? bf16_to_float(((uint16_t *)out)[i]) : ((float *)out)[i];
        CHECK(fabsf(three - 3) < 1e-6f && fabsf(one - 1) < 1e-6f);
    }
    KERNEL(shoal_residual_norm)(x, 0, 0, 0, scale, out, rows, size, 0, bf16);
    KERNEL(shoal_residual_norm)(x, 0, residual, sum, 0, 0, rows, size, 0, bf16);
}

int main(void) {
    for (int32_t bf16 = 0; bf16 < 2; bf16++)
        for (int64_t size = 1; size < 70; size += 17) test(3, size, bf16);
    test(0, 16, 0);
    test(40, 577, 1);
    return 0;
}
