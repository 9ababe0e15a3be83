/* Inputs of products with integer weights, quantised on the fly in groups of 32. */
#ifndef SHOAL_QUANTISED_INPUTS_H
#define SHOAL_QUANTISED_INPUTS_H

#include "int8_tile.h"
#include "product.h"

static float from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Bits of the largest magnitude of 32 inputs; above those of infinity where one is NaN. */
INLINE uint32_t largest_of(const float *x) {
    uint32_t largest = 0;
    for (int i = 0; i < GROUP; i++) {
        const uint32_t magnitude = to_bits(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Quantise the 32 inputs of a group, of which the largest is known; the scale is its magnitude * (1 / 127).

   A group too small for a finite 127 / magnitude becomes 0; one that is not finite makes the outputs NaN. */
INLINE void quantise_group(const float *x, uint32_t largest, struct group *group, int row) {
    const int finite = largest < 0x7f800000, usable = finite && from_bits(largest) >= 0x1p-100f;
    const float inverse = 127.0f / from_bits(usable ? largest : 0x7f800000);
    int32_t rounded[GROUP];
    for (int i = 0; i < GROUP; i++) {
        /* Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, in the lowest bits. */
        rounded[i] = (int32_t)to_bits(x[i] * inverse + 12582912.0f) - 0x4b400000;
        rounded[i] = finite ? rounded[i] : 0;
    }
    put_values(rounded, group, row);
    group->scales[row] = finite ? from_bits(usable ? largest : 0) * (1.0f / 127) : from_bits(0x7fc00000);
}

static int can_read_inputs(const struct job *job) {
    (void)job;
    return 0; /* they are quantised first */
}

/* First all magnitudes, then all values: no group then waits for the one before. */
static void prepare_row(const struct job *job, int64_t row, struct group *groups) {
    _Alignas(64) float values[GROUP];
    for (int64_t g = 0; g < job->groups; g++) {
        read_group(job, row, g * GROUP, values);
        groups[g].scales[row % ROWS] = from_bits(largest_of(values));
    }
    for (int64_t g = 0; g < job->groups; g++) {
        read_group(job, row, g * GROUP, values);
        quantise_group(values, to_bits(groups[g].scales[row % ROWS]), groups + g, row % ROWS);
    }
}

#endif
