use super::*;
use artifact::tensor::TensorData;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::time::Duration;

fn version(serial: i64) -> Version {
    let tensor = TensorData::new(Dtype::BF16, vec![2, 2], vec![serial as u8; 8]).unwrap();
    let checkpoint = Checkpoint {
        tensors: BTreeMap::from([("w".to_owned(), tensor)]),
        files: BTreeMap::from([("config.json".to_owned(), "{}".into())]),
    };
    Version {
        serial,
        root: checkpoint.root(),
        checkpoint: Arc::new(checkpoint),
    }
}

fn folders(dir: &Path, command: Option<&str>) -> Folders {
    let folders = Folders {
        dir: dir.join("weights"),
        policy: "demo".into(),
        alias: "champion".into(),
        keep: 2,
        quantized: None,
        command: command.map(|line| Command {
            line: line.into(),
            timeout: Duration::from_secs(60),
        }),
    };
    folders.open().unwrap();
    folders
}

fn in_force(folders: &Folders) -> Digest {
    Checkpoint::read_dir(&folders.dir.join(CURRENT)).unwrap().root()
}

#[tokio::test]
async fn the_link_names_the_newest_version_and_as_many_as_wanted_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let folders = folders(dir.path(), None);
    std::fs::create_dir(folders.dir.join("v9-mine")).unwrap();
    for serial in [1, 2, 3, 2] {
        folders.put_in_force(&version(serial), None).await.unwrap();
        assert_eq!(in_force(&folders), version(serial).root);
    }
    let status = read_status(&folders.dir.join(STATUS)).unwrap().unwrap();
    assert_eq!((status.version, status.root), (2, version(2).root));
    let mut expected: Vec<String> = [2, 3].map(|serial| name_of(serial, version(serial).root)).into();
    assert_eq!(status.kept, expected);
    expected.extend([CURRENT, STATUS, "v9-mine"].map(str::to_owned));
    expected.sort();
    let mut found = names(&folders.dir).unwrap();
    found.sort();
    assert_eq!(found, expected);
    // of an unchanged version, the time stays
    folders.put_in_force(&version(2), None).await.unwrap();
    assert_eq!(read_status(&folders.dir.join(STATUS)).unwrap(), Some(status));
}

#[tokio::test]
async fn a_damaged_folder_is_written_again_before_it_is_in_force() {
    let dir = tempfile::tempdir().unwrap();
    let folders = folders(dir.path(), None);
    let folder = folders.dir.join(name_of(1, version(1).root));
    version(2).checkpoint.write_dir(&folder).unwrap();
    folders.put_in_force(&version(1), None).await.unwrap();
    assert_eq!(in_force(&folders), version(1).root);
}

#[tokio::test]
async fn what_a_killed_process_left_is_removed_and_the_rest_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let first = folders(dir.path(), None);
    first.put_in_force(&version(1), None).await.unwrap();
    // killed while it wrote version 2, and before it wrote the status of version 1
    let torn = first.dir.join(format!("{UNFINISHED}{}", name_of(2, version(2).root)));
    std::fs::create_dir(&torn).unwrap();
    std::fs::remove_file(first.dir.join(STATUS)).unwrap();
    let again = folders(dir.path(), None);
    assert!(!torn.exists());
    let bases = again.bases(2, version(2).root, &[]);
    assert_eq!(bases.iter().map(|(serial, _)| *serial).collect::<Vec<_>>(), [1]);
    again.put_in_force(&version(1), None).await.unwrap();
    let status = read_status(&again.dir.join(STATUS)).unwrap().unwrap();
    assert_eq!(status.version, 1);
}

#[tokio::test]
async fn the_link_moves_only_after_the_command_has_succeeded() {
    let dir = tempfile::tempdir().unwrap();
    folders(dir.path(), None).put_in_force(&version(1), None).await.unwrap();
    let fails = folders(dir.path(), Some("exit 1"));
    let error = fails.put_in_force(&version(2), None).await.unwrap_err();
    assert!(format!("{error:#}").contains("version 2 is not in force"), "{error:#}");
    assert_eq!(in_force(&fails), version(1).root);
    // the next try has the folder already
    assert_eq!(fails.bases(2, version(2).root, &[]).len(), 2);
    let works = folders(
        dir.path(),
        Some(r#"test -f "$SPRINGTIDE_PATCH" && cp "$SPRINGTIDE_FOLDER/config.json" "$SPRINGTIDE_FOLDER/../../ran""#),
    );
    works.put_in_force(&version(2), Some(&version(1))).await.unwrap();
    assert_eq!(in_force(&works), version(2).root);
    assert_eq!(std::fs::read_to_string(dir.path().join("ran")).unwrap(), "{}");
}

#[tokio::test]
async fn versions_whose_commands_fail_do_not_add_up() {
    let dir = tempfile::tempdir().unwrap();
    folders(dir.path(), None).put_in_force(&version(1), None).await.unwrap();
    let fails = folders(dir.path(), Some("exit 1"));
    for serial in 2..6 {
        fails.put_in_force(&version(serial), None).await.unwrap_err();
    }
    let mut found = names(&fails.dir).unwrap();
    found.retain(|name| name.starts_with('v'));
    found.sort();
    assert_eq!(found, [1, 5].map(|serial| name_of(serial, version(serial).root)));
}

#[tokio::test]
async fn the_command_runs_for_the_version_of_the_link_after_another_one_was_tried() {
    let dir = tempfile::tempdir().unwrap();
    let line = r#"echo "$SPRINGTIDE_VERSION" >> "$SPRINGTIDE_FOLDER/../../ran"; test "$SPRINGTIDE_VERSION" != 2"#;
    let before = folders(dir.path(), Some(line));
    before.put_in_force(&version(1), None).await.unwrap();
    assert!(before.is_in_force(1, version(1).root));
    before.put_in_force(&version(2), None).await.unwrap_err();
    // as after a kill: another process knows only the disk
    let after = folders(dir.path(), Some(line));
    assert!(!after.is_in_force(1, version(1).root));
    after.put_in_force(&version(1), None).await.unwrap();
    after.put_in_force(&version(1), None).await.unwrap();
    assert_eq!(std::fs::read_to_string(dir.path().join("ran")).unwrap(), "1\n2\n1\n");
    assert!(after.is_in_force(1, version(1).root) && !after.dir.join(TRIED).exists());
}

#[tokio::test]
async fn after_a_failed_command_only_its_own_version_gets_a_patch() {
    let dir = tempfile::tempdir().unwrap();
    let line = r#"echo "$SPRINGTIDE_VERSION${SPRINGTIDE_PATCH:+ patch}" >> "$SPRINGTIDE_FOLDER/../../ran"
                  test -f "$SPRINGTIDE_FOLDER/../../ready""#;
    let folders = folders(dir.path(), Some(line));
    fs::write(dir.path().join("ready"), "").unwrap();
    folders.put_in_force(&version(1), None).await.unwrap();
    fs::remove_file(dir.path().join("ready")).unwrap();
    // the engine may hold version 1 or 2, and then 3
    for serial in [2, 2, 3, 3] {
        folders
            .put_in_force(&version(serial), Some(&version(1)))
            .await
            .unwrap_err();
    }
    fs::write(dir.path().join("ready"), "").unwrap();
    folders.put_in_force(&version(3), Some(&version(1))).await.unwrap();
    folders.put_in_force(&version(4), Some(&version(3))).await.unwrap();
    let ran = std::fs::read_to_string(dir.path().join("ran")).unwrap();
    let ran: Vec<&str> = ran.lines().collect();
    assert_eq!(ran, ["1", "2 patch", "2 patch", "3", "3", "3", "4 patch"]);
}

#[tokio::test]
async fn a_link_that_moved_before_its_status_was_written_moves_back() {
    let dir = tempfile::tempdir().unwrap();
    let folders = folders(dir.path(), None);
    folders.put_in_force(&version(1), None).await.unwrap();
    folders.write(&version(2)).unwrap();
    folders.switch(&name_of(2, version(2).root)).unwrap();
    assert!(!folders.is_in_force(1, version(1).root) && !folders.is_in_force(2, version(2).root));
    folders.put_in_force(&version(1), None).await.unwrap();
    assert_eq!(in_force(&folders), version(1).root);
    assert!(folders.is_in_force(1, version(1).root));
}

#[tokio::test]
async fn folders_may_be_read_by_whom_the_parent_names() {
    let dir = tempfile::tempdir().unwrap();
    let folders = folders(dir.path(), None);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for (parent, inside, file) in [(0o750, 0o750, 0o640), (0o755, 0o755, 0o644), (0o700, 0o700, 0o600)] {
        fs::set_permissions(&folders.dir, Permissions::from_mode(parent)).unwrap();
        let version = version(i64::from(parent));
        folders.put_in_force(&version, None).await.unwrap();
        let folder = folders.dir.join(CURRENT);
        assert_eq!(mode(&folder), inside);
        assert_eq!(mode(&folder.join("config.json")), file);
        assert_eq!(mode(&folders.dir.join(STATUS)), file);
    }
}
