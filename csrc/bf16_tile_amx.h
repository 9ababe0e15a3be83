/* The products of bf16_tile.h by AMX: a tile of rows is two of its tiles, and so are the weights of a group. */
#ifndef SHOAL_BF16_TILE_AMX_H
#define SHOAL_BF16_TILE_AMX_H

INLINE void begin_products(void) { begin_tiles(TILE_ROWS); }
INLINE void end_products(void) { end_tiles(); }

/* out[row][column] for 16 rows of a tile, or all 32, and the columns of a panel. */
INLINE void multiply_halves(const struct inputs *x, const struct panel *panel, const int both, float (*out)[PANEL]) {
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    const uint8_t *weights = panel->weights, *ahead = panel->ahead;
    const int64_t share = panel->ahead_groups * GROUP_BYTES / panel->groups;
    for (int64_t g = 0; g < panel->groups; g++, weights += GROUP_BYTES, ahead += share) {
        for (int64_t i = 0; i < share; i += 64) _mm_prefetch((const char *)ahead + i, _MM_HINT_T1);
        _tile_stream_loadd(6, weights, PANEL * 4);
        _tile_loadd(4, x[0].first + g * x[0].group, x[0].row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_stream_loadd(7, weights + TILE_BYTES, PANEL * 4);
        _tile_dpbf16ps(1, 4, 7);
        if (!both) continue;
        _tile_loadd(5, x[1].first + g * x[1].group, x[1].row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out[0], sizeof *out);
    _tile_stored(1, out[0] + PANEL / 2, sizeof *out);
    if (!both) return;
    _tile_stored(2, out[TILE_ROWS], sizeof *out);
    _tile_stored(3, out[TILE_ROWS] + PANEL / 2, sizeof *out);
}

/* out[row][column] for the first rows of a tile and the columns of a panel. Other rows of its inputs are computed with
   regardless of their contents, and not used. */
static void multiply_tile(const struct inputs *inputs, const struct panel *panel, const int rows,
                          float (*out)[PANEL]) {
    if (rows > TILE_ROWS) multiply_halves(inputs, panel, 1, out);
    else multiply_halves(inputs, panel, 0, out);
}

#endif
