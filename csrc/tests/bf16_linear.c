/* Products of all shapes of tiles, panels and groups keep to their buffers, are close to those in double, and with
   inputs in bfloat16 the same. */
#include "guard.h"

#include "../kernels/bf16_linear.c"

enum { PARTS = 2 };

/* A part of columns with some weights, packed; dense [columns, inputs] gets their values. */
static struct linear part_of(int64_t inputs, int64_t columns, float *dense) {
    const int64_t groups = (inputs + GROUP - 1) / GROUP, panels = (columns + PANEL - 1) / PANEL;
    uint8_t *weights = guarded((size_t)(panels * groups * GROUP_BYTES));
    float *bias = guarded_floats((size_t)(panels * PANEL), 7);
    for (int64_t column = 0; column < panels * PANEL; column++)
        for (int64_t i = 0; i < groups * GROUP; i++) {
            const int inside = i < inputs && column < columns;
            const uint16_t value = float_to_bf16(inside ? sinf((float)(i * 37 + column * 101)) : 0);
            const int64_t at = ((column / PANEL * groups * PAIRS + i / 2) * PANEL + column % PANEL) * 2 + i % 2;
            ((uint16_t *)weights)[at] = value;
            if (inside) dense[column * inputs + i] = bf16_to_float(value);
        }
    return (struct linear){weights, NULL, bias, columns, 0};
}

static void check(int64_t rows, int64_t inputs, int64_t columns, int64_t activation) {
    const int64_t outputs = activation == NO_ACTIVATION ? PARTS * columns : columns;
    struct linear parts[PARTS];
    float *dense = guarded_floats((size_t)(PARTS * columns * inputs), 1);
    for (int i = 0; i < PARTS; i++) parts[i] = part_of(inputs, columns, dense + i * columns * inputs);
    const struct product product = {parts, PARTS, inputs, activation};
    float *x = guarded_floats((size_t)(rows * inputs), 2);
    uint16_t *x16 = guarded((size_t)(rows * inputs) * sizeof *x16);
    for (int64_t i = 0; i < rows * inputs; i++) x16[i] = float_to_bf16(x[i]), x[i] = bf16_to_float(x16[i]);
    float *y = guarded((size_t)(rows * outputs) * sizeof *y);
    CHECK(KERNEL(shoal_bf16_product)(&product, x, y, rows, 0));
    for (int64_t row = 0; row < rows && activation == NO_ACTIVATION; row++)
        for (int64_t column = 0; column < outputs; column++) {
            double sum = parts[column / columns].bias[column % columns], size = 1;
            for (int64_t i = 0; i < inputs; i++) {
                const double term = (double)x[row * inputs + i] * dense[column * inputs + i];
                sum += term, size += fabs(term);
            }
            CHECK(fabs(y[row * outputs + column] - sum) < 1e-5 * size);
        }
    uint16_t *y16 = guarded((size_t)(rows * outputs) * sizeof *y16);
    CHECK(KERNEL(shoal_bf16_product)(&product, x16, y16, rows, 1));
    for (int64_t i = 0; i < rows * outputs; i++) {
        CHECK((y16[i] & 0x7f80) != 0x7f80);
        CHECK(fabsf(bf16_to_float(y16[i]) - y[i]) <= 0x1p-8f * fabsf(y[i]) + 1e-30f); /* the same, rounded */
    }
}

int main(void) {
    const int64_t rows[] = {0, 1, 2, 3, 4, 5, 11, 12, 13, 16, 17, 32, 100, 130};
    const int64_t inputs[] = {1, 32, 71, 96}, columns[] = {1, 32, 67};
    for (int r = 0; r < 14; r++)
        for (int i = 0; i < 4; i++)
            for (int c = 0; c < 3; c++)
                for (int64_t activation = NO_ACTIVATION; activation <= GELU_ERF; activation++)
                    check(rows[r], inputs[i], columns[c], activation);
    return 0;
}
