"""Planted bugs in settings, data and the folders of other libraries."""

from tests.mutations.bug import Bug

DATA = (
    Bug(
        name="impatient-read",
        module="holmesjax.data.patience",
        old="    if not has_trained:\n",
        new="    if not has_trained or has_trained:\n",
        wrong="data that are gone for a second end a run that has trained on them",
        tests=(
            "tests/data/test_patience.py::"
            "test_data_of_each_kind_that_come_back_are_those_they_were",
        ),
    ),
    Bug(
        name="bits-for-bytes",
        module="holmesjax.units",
        old='_scaled(DECIMAL, "bps", 1 / 8)',
        new='_scaled(DECIMAL, "bps")',
        wrong="Gbps are read as gigabytes per second",
        tests=("tests/test_units.py::test_parse",),
    ),
    Bug(
        name="odd-runs",
        module="holmesjax.config.parallel_checks",
        old="runs = 2 * context  # of tokens: each part has two",
        new="runs = context  # of tokens: each part has two",
        wrong="sequences that ring attention cannot cut in two runs for each device are accepted",
        tests=("tests/config/test_checks.py::test_settings_that_do_not_fit_each_other",),
    ),
    Bug(
        name="special-tokens-in-a-corpus",
        module="holmesjax.data.tokenizer_files",
        old="inner.encode_special_tokens = True",
        new="inner.encode_special_tokens = False",
        wrong="a special token that stands in a text becomes a mark",
        tests=("tests/data/test_tokenizer_files.py::test_a_text_comes_back_whole_and_in_pieces",),
    ),
    Bug(
        name="ids-of-the-base",
        module="holmesjax.hugging_face.export",
        old="if kept is None or not tokenizer.is_of(kept):",
        new="if kept is None:",
        wrong="an export has ids of the base's tokenizer beside the run's",
        tests=("tests/hugging_face/test_tokenizers.py::test_an_export_mixes_no_two_tokenizers",),
    ),
    Bug(
        name="trimmed-places",
        module="holmesjax.data.tokenizer_files",
        old="other.post_processor = None  #",
        new="other.post_processor = self.inner.post_processor  #",
        wrong="spaces that begin an answer do not train",
        tests=("tests/hugging_face/test_tokenizers.py::test_spaces_of_an_answer_count",),
    ),
    Bug(
        name="null-token",
        module="holmesjax.data.tokenizer_marks",
        old="named.items() if token is not None}",
        new="named.items()}",
        wrong="a bos_token that is null is the text None in every dialogue",
        tests=(
            "tests/hugging_face/test_tokenizers.py::test_a_template_has_the_variables_that_transformers_gives",
        ),
    ),
    Bug(
        name="arrow-end",
        module="holmesjax.data.row_documents",
        old="if file.read() != END:",
        new="if not file.read():",
        wrong="rows of a dataset that was cut off behind a batch are missing without a word",
        tests=(
            "tests/data/test_document_formats.py::test_a_damaged_file_is_refused_with_its_place",
        ),
    ),
    Bug(
        name="files-by-their-ending",
        module="holmesjax.data.file_kinds",
        old="        return LINES\n",
        new="        return TEXT\n",
        wrong="JSON lines under other names than .jsonl train as raw JSON",
        tests=("tests/data/test_corpus_files.py::test_bytes_decide_how_a_file_is_read",),
    ),
    Bug(
        name="links-not-followed",
        module="holmesjax.data.corpus_files",
        old="elif entry.is_symlink():\n                    links.append(path)",
        new="elif entry.is_symlink():\n                    pass",
        wrong="what is behind a link is not read, without a word",
        tests=("tests/data/test_corpus_files.py::test_links_are_followed_once",),
    ),
    Bug(
        name="left-out-in-silence",
        module="holmesjax.data.corpus_files",
        old="            left_out.add(kind.words, name)\n",
        new="            pass\n",
        wrong="files of a kind that is not read are left out, without a word",
        tests=("tests/data/test_corpus_files.py::test_what_is_left_out_is_counted_and_named",),
    ),
    Bug(
        name="cut-stream-for-whole",
        module="holmesjax.data.compressed_files",
        old='raise wrong("it ends inside of a frame")',
        new="return",
        wrong="a compressed file that is cut off gives fewer documents, without a word",
        tests=(
            "tests/data/test_corpus_files.py::test_damage_behind_the_beginning_of_a_file_is_refused",
        ),
    ),
    Bug(
        name="null-is-a-number",
        module="holmesjax.data.row_documents",
        old="if value.values.null_count:",
        new="if False:",
        wrong="a null among tokens becomes another token",
        tests=(
            "tests/data/test_corpus_files.py::test_a_null_among_tokens_is_named_with_file_and_row",
        ),
    ),
    Bug(
        name="page-of-ranks",
        module="holmesjax.data.number_files",
        old="np.searchsorted(self._first_P, value)) - 1",
        new='np.searchsorted(self._first_P, value, side="right")) - 1',
        wrong="documents that begin at one place are counted from their last page on",
        tests=("tests/data/test_number_files.py::test_ranks_are_those_of_the_array_on_every_page",),
    ),
    Bug(
        name="short-read",
        module="holmesjax.data.object_stores",
        old="if len(found) < count:",
        new="if len(found) < 0:",
        wrong="a file of tokens that shrinks gives short windows, and no message",
        tests=(
            "tests/data/test_token_files.py::test_a_file_that_becomes_shorter_while_it_is_read_is_named",
        ),
    ),
    Bug(
        name="half-the-validation",
        module="holmesjax.data.corpus",
        old="< fraction * PLACES",
        new="< fraction * PLACES / 2",
        wrong="the validation split is half as large as it should be",
        tests=("tests/data/test_batches.py::test_the_share_of_the_files_held_out_is_the_fraction",),
    ),
    Bug(
        name="one-order-for-all-epochs",
        module="holmesjax.data.batches",
        old="round_keys(self.seed, stream + epoch)",
        new="round_keys(self.seed)",
        wrong="every epoch reads the windows in the same order",
        tests=(
            "tests/data/test_batches.py::test_every_epoch_visits_every_window_once_in_an_order_of_its_own",
        ),
    ),
    Bug(
        name="a-change-of-weights-begins-a-corpus-anew",
        module="holmesjax.data.mixing",
        old="own_K + self._taken[phase][source_K[here]]",
        new="own_K",
        wrong="where weights change, each corpus is read from its beginning again",
        tests=(
            "tests/data/test_mixing.py::test_a_change_of_weights_goes_on_where_each_source_was",
        ),
    ),
    Bug(
        name="prompts-are-targets",
        module="holmesjax.data.packing",
        old="targets[here][~trained] = -1",
        new="pass",
        wrong="what a user says counts in the loss",
        tests=(
            "tests/data/test_chat.py::test_answers_and_their_end_marks_are_the_targets_of_dialogues",
        ),
    ),
    Bug(
        name="a-piece-ends-without-its-target",
        module="holmesjax.data.packing",
        old="yield place + cut, min(length, count - cut)",
        new="yield place + cut, min(length, count - cut) - (cut + length < count)",
        wrong="the target behind each cut of a long document is lost",
        tests=(
            "tests/data/test_packing.py::test_each_target_of_each_document_comes_once_however_documents_are_cut",
        ),
    ),
    Bug(
        name="islands-read-the-same-items",
        module="holmesjax.data.batches",
        old="order_B[is_own_B] * turn.readers + turn.number",
        new="order_B[is_own_B]",
        wrong="islands with mixtures of their own train on the same sequences",
        tests=(
            "tests/data/test_named_corpora.py::"
            "test_an_island_reads_its_own_mixture_and_nothing_of_the_others",
        ),
    ),
    Bug(
        name="rows-of-a-mixture-stay",
        module="holmesjax.data.batches",
        old="part_B, order_B = source.schedule.picks(first_sequence + row_B)",
        new="part_B, order_B = source.schedule.picks(first_sequence + np.sort(row_B))",
        wrong="a corpus of a mixture is always read by the same devices",
        tests=("tests/data/test_mixing.py::test_sources_do_not_stay_in_rows_of_their_own",),
    ),
    Bug(
        name="masks-a-token-late",
        module="holmesjax.data.batches",
        old="np.cumsum(rows.begins_NL[:, :-1], axis=1)",
        new="np.cumsum(rows.begins_NL[:, 1:], axis=1)",
        wrong="the last token of a document is of the next one, as its target is",
        tests=(
            "tests/data/test_packing.py::test_documents_of_a_row_have_segments_of_their_own_and_padding_another",
        ),
    ),
    Bug(
        name="the-smallest-remainder",
        module="holmesjax.data.mixing",
        old='largest = np.argsort(-(share_S - whole_S), kind="stable")',
        new='largest = np.argsort(share_S - whole_S, kind="stable")',
        wrong="what is left of the weights of a mixture goes to those that were rounded least",
        tests=(
            "tests/data/test_mixing.py::test_weights_become_whole_numbers_by_largest_remainder",
        ),
    ),
    Bug(
        name="targets-of-own-rows",
        module="holmesjax.data.batches",
        old="for source, i in picked)",
        new="for source, i in wanted)",
        wrong="a process weighs the loss by the targets of its own rows, not of the whole batch",
        tests=(
            "tests/data/test_batches.py::test_targets_that_do_not_count_are_below_zero_and_counted_over_the_whole_batch",
        ),
    ),
    Bug(
        name="a-large-tensor-ends-a-file",
        module="holmesjax.hugging_face.export",
        old="if size > max_bytes:",
        new="if size > max_bytes and not filling:",
        wrong="a tensor above the limit of a file ends the file that is being filled",
        tests=(
            "tests/hugging_face/test_export.py::test_files_have_the_tensors_that_huggingface_hub_gives_them",
        ),
    ),
)
