"""Defects that are put back into the real code of checkpoints, one at a time."""

from __future__ import annotations

from tests.exploration.mutants import Mutant

_PATH = "lightning_loco.strategies.checkpoint"

MUTANTS = [
    Mutant(
        "the folder is not synced after a main file was renamed",
        f"{_PATH}.atomic_io.move_file",
        "disk.sync(target.parent)",
        "pass",
    ),
    Mutant(
        "the folder is not synced after a file was written",
        f"{_PATH}.atomic_io._write",
        "disk.sync(target.parent)",
        "pass",
    ),
    Mutant(
        "a file is renamed before its content is on the disk",
        f"{_PATH}.atomic_io._write",
        "disk.sync_file(file)",
        "pass",
    ),
    Mutant(
        "the saves before are deleted before the main file is replaced",
        f"{_PATH}.writer.Save.commit",
        "files, stamp, has_side_files = self.files, self.stamp, self.own is not None",
        "files, stamp, has_side_files = self.files, self.stamp, self.own is not None\n"
        "    [files.remove_save(one) for one in before]",
    ),
    Mutant(
        "the saves before are listed after this one was written",
        f"{_PATH}.writer.Save._prepare",
        "return before",
        "return self.files.stamps() if lists else []",
    ),
    Mutant(
        "the main file is replaced without asking whether all files are still there",
        f"{_PATH}.writer.Save.to_shared_folder",
        "[*range(num_workers)]",
        "[worker]",
    ),
    Mutant(
        "two writers that replace a folder first use one subfolder",
        f"{_PATH}.atomic_io._has_links",
        'target / f"{_FIRST}_{name}"',
        "target / _FIRST",
    ),
    Mutant(
        "shards that were deleted meanwhile are not missed",
        f"{_PATH}.main_file.ShardedMainFile.writer",
        'not disk.is_file(f"{path}/{name}")',
        "False",
    ),
    Mutant(
        "a save that another run deletes replaces the main file",
        f"{_PATH}.side_files.SideFiles.commit_main",
        "if disk.exists(staged.with_name(_DELETED)):",
        "if False:",
    ),
    Mutant(
        "the files of a save are deleted one after the other",
        f"{_PATH}.side_files.SideFiles.remove_save",
        "self._disk.read_link(local) is None",
        "False",
        lacks="More than one event between the mark of a deletion and the first file.",
    ),
    Mutant(
        "only worker 0 writes the shared state, also on private disks",
        f"{_PATH}.writer.Save.to_private_folders",
        "yield Do.WRITE, partial(self.write_shared, staged=True) if is_first else None",
        "yield Do.WRITE, partial(self.write_shared, staged=True) if worker == 0 else None",
    ),
    Mutant(
        "the file that a living writer has open is deleted",
        f"{_PATH}.atomic_io._write",
        "disk.remove_abandoned(target.with_name(found))",
        "disk.remove(target.with_name(found))",
    ),
    Mutant(
        "what a killed writer has left is not deleted",
        f"{_PATH}.side_files.SideFiles.delete_older",
        "self.remove_save(found)",
        "pass",
    ),
    Mutant(
        "a save that has failed is not deleted",
        f"{_PATH}.side_files.SideFiles.delete_older",
        "before = [found for found in before if found != stamp]",
        "before = [found for found in before if found in stamps_in(self.path, self._io)]",
    ),
    Mutant(
        "an error of worker 0 leaves its save in place of another one",
        f"{_PATH}.side_files.SideFiles.discard",
        "if stamp not in stamps_in(self.path, self._io):",
        "if True:",
    ),
    Mutant(
        "the staged main file of a suspended writer stays",
        f"{_PATH}.atomic_io.remove_staged",
        "disk.remove(staged)",
        "pass",
    ),
    Mutant(
        "a new main folder is linked before its files are on the disk",
        f"{_PATH}.atomic_io.move_folder",
        "_link_files(disk, target, name)",
        "pass",
    ),
    Mutant(
        "the links of a folder are not synced",
        f"{_PATH}.atomic_io._has_links",
        "disk.sync(first)",
        "pass",
    ),
    Mutant(
        "the oldest save that all have is chosen on private disks",
        f"{_PATH}.reader.choose_save",
        "steps_of(one), one)",
        "-steps_of(one), one)",
    ),
    Mutant(
        "the main file is replaced before all others have written theirs",
        f"{_PATH}.writer.Save.to_shared_folder",
        "yield Do.WRITE, partial(self.write_shared, staged) if is_first else None",
        "self.write_shared(staged) if is_first else None",
    ),
    Mutant(
        "a suspended worker on a private disk does not miss its own file",
        f"{_PATH}.writer.Save.to_private_folders",
        "sorted({*files.workers_of(stamp), worker})",
        "files.workers_of(stamp)",
    ),
    Mutant(
        "a folder is replaced by two renames",
        f"{_PATH}.atomic_io.move_folder",
        "if disk.is_dir(source) and _has_links(disk, target, name):",
        "if False:",
    ),
    Mutant(
        "a save is moved to a folder that a killed process has left",
        f"{_PATH}.side_files.SideFiles.remove_save",
        "{_REMOVED}{new_stamp(steps_of(stamp))}",
        "{_REMOVED}{stamp}",
    ),
]
